"""README.md and plots of a comparison, from its results.json alone."""

from pathlib import Path

import plots

NONE = "–"


def number(value: float | None, decimals: int = 2) -> str:
    return NONE if value is None else f"{value:.{decimals}f}"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def proposer(group: dict, kind: str) -> dict | None:
    """The numbers of one kind of proposer in a group of prompts."""
    return next((found for found in group["proposers"] if found["proposer"] == kind), None)


def at(evaluation: dict, temperature: float) -> dict:
    return next(found for found in evaluation["temperatures"] if abs(found["temperature"] - temperature) < 1e-9)


def tau(group: dict, kind: str = "draft") -> float | None:
    found = proposer(group, kind)
    return found and found["acceptance"]["tau"]


def interval(found: dict | None) -> str:
    if not found or not found["speedup"]:
        return NONE
    totals = found["speedup"]["totals"]
    # A verdict is a word; a reason for none has numbers.
    without = "" if isinstance(found["verdict"], str) else ", no verdict"
    if totals["low"] is None:
        return f"{totals['value']:.2f}x{without}"
    return f"{totals['value']:.2f}x [{totals['low']:.2f}, {totals['high']:.2f}]{without}"


def names(drafters: list[dict]) -> list[str]:
    """The algorithm where that tells the drafters apart, else the recipe's name."""
    algorithms = [drafter["algorithm"] for drafter in drafters]
    return algorithms if len(set(algorithms)) == len(algorithms) else [drafter["name"] for drafter in drafters]


def budget_table(drafters: list[dict], labels: list[str]) -> str:
    rows = []
    for drafter, label in zip(drafters, labels):
        info, timing = drafter["whole"]["drafter"], drafter["timing"]
        rows.append([label, number(info["parameters"] / 1e6, 1) + " M", str(info["block_size"]),
                     str(info["target_layer_ids"]), number(timing["step_ms"], 0), str(drafter["steps"]),
                     str(drafter["sequences"]), number(drafter["minutes"], 1)])
    header = ["", "trained parameters", "block", "target layers", "ms/step (timing)", "steps", "sequences", "minutes of steps"]
    return table(header, rows)


def places(evaluation: dict, temperature: float) -> list[dict]:
    """All prompts together, then each set."""
    found = at(evaluation, temperature)
    return [found["all"], *found["sets"]]


def tau_table(drafters: list[dict], labels: list[str], temperature: float) -> str:
    rows = []
    for place, group in enumerate(places(drafters[0]["whole"], temperature)):
        row = [group["name"], str(group["prompts"]), number(tau(group, "ngram"))]
        for kind in ("draft", "hybrid"):
            row += [number(tau(places(drafter["whole"], temperature)[place], kind)) for drafter in drafters]
        rows.append(row)
    return table(["set", "prompts", "n-gram lookup", *labels, *[f"{label} with lookup" for label in labels]], rows)


def tau_bars(drafters: list[dict], labels: list[str], temperature: float, place: int) -> list[tuple[str, float]]:
    """Tau of the lookup, of each drafter and of each with the lookup, in one group of prompts."""
    found = [("n-gram lookup", tau(places(drafters[0]["whole"], temperature)[place], "ngram"))]
    for kind, suffix in (("draft", ""), ("hybrid", " + lookup")):
        found += [(label + suffix, tau(places(drafter["whole"], temperature)[place], kind))
                  for drafter, label in zip(drafters, labels)]
    return [(name, value or 0.0) for name, value in found]


def positions(drafter: dict, temperature: float) -> list[dict]:
    found = proposer(at(drafter["whole"], temperature)["all"], "draft")
    return found["acceptance"]["positions"] if found else []


def conditional_table(drafters: list[dict], labels: list[str], temperature: float) -> str:
    longest = max(len(positions(drafter, temperature)) for drafter in drafters)
    rows = []
    for drafter, label in zip(drafters, labels):
        rates = [number(found["conditional_rate"]) for found in positions(drafter, temperature)]
        rows.append([label, *rates, *[NONE] * (longest - len(rates))])
    return table(["", *[str(k + 1) for k in range(longest)]], rows)


def speed_table(drafters: list[dict], labels: list[str], temperature: float) -> str:
    rows = []
    for place, group in enumerate(places(drafters[0]["adaptive"], temperature)):
        row = [group["name"], interval(proposer(group, "ngram"))]
        for kind in ("draft", "hybrid"):
            row += [interval(proposer(places(drafter["adaptive"], temperature)[place], kind)) for drafter in drafters]
        rows.append(row)
    return table(["set", "n-gram lookup", *labels, *[f"{label} with lookup" for label in labels]], rows)


def calibration_table(drafters: list[dict], labels: list[str]) -> str:
    rows = []
    for drafter, label in zip(drafters, labels):
        found = drafter["whole"].get("calibration")
        if not found:
            rows.append([label, "no confidence head", *[NONE] * 7])
            continue
        before, after = found["all"]["before"]["summary"], found["all"]["after"]["summary"]
        temperatures = ", ".join(number(value) for value in found["table"]["temperatures"])
        pairs = [number(side[key], 3) for key in ("ece", "auroc", "brier") for side in (before, after)]
        rows.append([label, temperatures, str(found["table"]["num_samples"]), *pairs])
    return table(["", "temperatures", "blocks", "ECE", "after", "AUROC", "after", "Brier", "after"], rows)


def ratios(drafters: list[dict], labels: list[str], temperature: float) -> list[str]:
    """How the first drafter's acceptance length compares with the others'."""
    first, *others = [tau(at(drafter["whole"], temperature)["all"]) for drafter in drafters]
    return [f"At temperature {temperature:g} the tau of `{labels[0]}` is {100 * (first / other - 1):+.1f} % of that of `{label}`"
            f" ({first:.3f} against {other:.3f})."
            for other, label in zip(others, labels[1:]) if first and other]


def lossless(drafters: list[dict], labels: list[str]) -> list[str]:
    found = []
    for drafter, label in zip(drafters, labels):
        for name in ("whole", "adaptive"):
            evaluation = drafter[name]
            compared = evaluation["comparison"]
            if not compared["answers"]:
                continue
            word = "DO NOT ALL EQUAL" if compared["different"] else "equal"
            shown = "" if compared["accepted"] else ", which shows nothing"
            found.append(f"`{label}`, {name}: {compared['answers']} answers at temperature 0 {word} plain decoding: "
                         f"{compared['tokens']} tokens, of which {compared['accepted']} accepted drafts{shown}.")
    return found


def write(comparison: dict, out: Path) -> None:
    """Writes README.md and the plots into `out`."""
    drafters = comparison["drafters"]
    labels = names(drafters)
    evaluation = drafters[0]["whole"]
    origin, cache = evaluation["origin"], comparison["cache"]
    facts = ", ".join(f"{cache[key]} {key.replace('_', ' ')}" for key in ("samples", "tokens", "supervised_tokens") if key in cache)
    text = [
        f"# {', '.join(labels)} on {evaluation['recipe']['target']['model']}\n",
        f"One cache ({facts}; layers {cache['layers']}), {comparison['minutes']:g} minutes of training steps each, the same "
        "prompts for all. Acceptance is that of blocks verified whole; speed is that of one sequence at a time whose rounds choose "
        "their lengths. *With lookup*: each round takes the drafter's block or the n-gram lookup's, whichever promises more. "
        "Prompts that calibration was fitted on are not among those reported.\n",
        "## Budget\n", budget_table(drafters, labels),
    ]

    def plot(file: str, svg: str) -> None:
        (out / file).write_text(svg)
        text.append(f"![{file}]({file})\n")

    text.append("## Acceptance while training\n")
    text.append("Greedy decoding of a few prompts of the training data after so many minutes of steps: a curve, not a result.\n")
    for key, unit, file in (("minutes", "minutes of training steps", "tau_minutes.svg"), ("sequences", "sequences", "tau_sequences.svg")):
        series = [(label, [(point[key], point["tau"]) for point in drafter["curve"]]) for drafter, label in zip(drafters, labels)]
        plot(file, plots.lines("Tau while training", unit, series))
    for temperature in comparison["temperatures"]:
        text.append(f"## Temperature {temperature:g}\n")
        text += [f"{line}\n" for line in ratios(drafters, labels, temperature)]
        text += ["### Tau per set\n", tau_table(drafters, labels, temperature)]
        sets = [found["name"] for found in at(evaluation, temperature)["sets"]]
        groups = [(name, tau_bars(drafters, labels, temperature, 1 + place)) for place, name in enumerate(sets)]
        plot(f"tau_sets_t{temperature:g}.svg", plots.bars(f"Tau per set at temperature {temperature:g}", groups))
        text += ["### Conditional acceptance per position, given all before it\n", conditional_table(drafters, labels, temperature)]
        series = [(label, [(found["k"], found["conditional_rate"]) for found in positions(drafter, temperature)
                           if found["conditional_rate"] is not None]) for drafter, label in zip(drafters, labels)]
        plot(f"conditional_t{temperature:g}.svg",
             plots.lines(f"Conditional acceptance at temperature {temperature:g}", "position in the block", series, (0.0, 1.0)))
        text += ["### Measured speed against plain decoding [95 %], one sequence at a time, adaptive lengths\n", speed_table(drafters, labels, temperature)]
    text += ["## Confidence before and after calibration\n", calibration_table(drafters, labels)]
    text.append("## What was run\n")
    commit = f" ({origin['git_commit']})" if origin["git_commit"] else ""
    listed = [
        *lossless(drafters, labels),
        f"machine: {origin['machine']}; {origin['kernels']}, {origin['threads']} threads",
        f"program: deepspec {origin['version']}{commit}, started {origin['started']}",
        f"prompts of the cache: {comparison['prompts'] or 'those of the first recipe'}",
        "recipes: " + ", ".join(drafter["name"] for drafter in drafters)
        + (f" with {', '.join(comparison['overrides'])}" if comparison["overrides"] else ""),
        f"evaluation prompts SHA-256: {evaluation['prompt_ids_sha256']}",
    ]
    text.append("".join(f"- {line}\n" for line in listed))
    text.append("`results.json` holds all numbers. Written by `scripts/compare_drafters`; not to be edited by hand.\n")
    (out / "README.md").write_text("\n".join(text))
