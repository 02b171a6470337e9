"""What is measured. Engines take turns round by round, so that whatever disturbs the machine hits all of them alike."""

import argparse
from statistics import median

import environment
import spec
from engines import Engines, Side

CONTEXT = 256
ROWS = [1, 2, 4, 8, 16]
# Steps in a row: an answer of some length, after whose first steps an engine has back what of the caches the one before it took.
DECODED = 64
PROMPT_LENGTHS = [256, 512]
LAYERS = [1, 8, 15, 22, 28]
SEQUENCES = 8
# Sequences per pass: deepspec's cache stage fills passes of 1024 tokens; PyTorch may choose.
DEEPSPEC_BATCH, TORCH_BATCHES = 4, (1, 8)
SHAPE = {"anchors": 64, "slots": 7, "vocab": 49152, "draft_layers": 2, "markov_rank": 256, "target_layers": LAYERS}
OTHER_SHAPES = [SHAPE | {"anchors": n} for n in (32, 64, 128)] + [SHAPE | {"vocab": n} for n in (8192, 16384)]
# The same start gives the same loss and gradient; three steps of AdamW may amplify what rounding does.
LOSS_TOLERANCE, NORM_TOLERANCE = 2e-3, 1e-2

Cell = tuple[tuple, Side, str, dict]


def summary(seconds: list[float], tokens: int | None = None) -> dict:
    """Median, extremes and number of times; tokens per second of the median."""
    found = {"median_s": median(seconds), "min_s": min(seconds), "max_s": max(seconds), "n": len(seconds)}
    return found if tokens is None else found | {"tokens_per_s": tokens / found["median_s"]}


def alternate(cells: list[Cell], rounds: int) -> dict[tuple, list[float]]:
    """Asks for every cell once a round, beginning with another one each time; returns the seconds by key."""
    seconds: dict[tuple, list[float]] = {key: [] for key, *_ in cells}
    for turn in range(rounds):
        start = turn * len(cells) // rounds
        for key, side, op, request in cells[start:] + cells[:start]:
            seconds[key] += side.ask(op, **request)["seconds"]
    return seconds


def best_attention(found: dict[str, dict]) -> dict[str, dict]:
    """Keeps of llama.cpp's two ways of attention the faster one per format."""
    kept: dict[str, dict] = {}
    for name, result in found.items():
        base = name.removesuffix(" flash")
        result = result | ({"flash_attention": name != base} if base.startswith("llama.cpp") else {})
        if base not in kept or result["median_s"] < kept[base]["median_s"]:
            kept[base] = result
    return kept


def decode(engines: Engines, args: argparse.Namespace, _results: dict) -> dict:
    """One token after the context."""
    request = {"context": engines.tokens(CONTEXT), "rows": engines.tokens(1, CONTEXT), "repeats": DECODED}
    sides = engines.deepspec_sides + engines.llama_sides
    times = alternate([((side.name,), side, "rows", request) for side in sides], args.rounds)
    return best_attention({name: summary(seconds, 1) for (name,), seconds in times.items()})


def verify(engines: Engines, args: argparse.Namespace, _results: dict) -> dict:
    """Several tokens after the context, logits for all."""
    context = engines.tokens(CONTEXT)
    cells = [
        ((side.name, rows), side, "rows", {"context": context, "rows": engines.tokens(rows, CONTEXT), "repeats": 4})
        for side in engines.deepspec_sides + engines.llama_sides
        for rows in ROWS
    ]
    times = alternate(cells, args.rounds)
    by_rows = {rows: {name: summary(s, rows) for (name, n), s in times.items() if n == rows} for rows in ROWS}
    return {str(rows): best_attention(found) for rows, found in by_rows.items()}


def prefill(engines: Engines, args: argparse.Namespace, _results: dict) -> dict:
    """A prompt from nothing, logits for its last token."""
    sides = [*engines.deepspec_sides, *engines.llama_sides, engines.torch_side]
    cells = [
        ((side.name, length), side, "prefill", {"tokens": engines.tokens(length), "repeats": 1})
        for side in sides
        for length in PROMPT_LENGTHS
    ]
    times = alternate(cells, args.rounds)
    by_length = {n: {name: summary(s, n) for (name, m), s in times.items() if m == n} for n in PROMPT_LENGTHS}
    return {str(length): best_attention(found) for length, found in by_length.items()}


def prepare(engines: Engines, args: argparse.Namespace, _results: dict) -> dict:
    """What a target cache holds: outputs of five layers and final rows of whole sequences."""
    sequences = [engines.tokens(CONTEXT, i * CONTEXT) for i in range(SEQUENCES)]
    request = {"sequences": sequences, "layers": LAYERS, "repeats": 1}
    cells = [((s.name,), s, "prepare", request | {"batch": DEEPSPEC_BATCH}) for s in engines.deepspec_sides]
    side = engines.torch_side
    cells += [((f"{side.name} batch {n}",), side, "prepare", request | {"batch": n}) for n in TORCH_BATCHES]
    times = alternate(cells, args.rounds)
    return {name: summary(seconds, SEQUENCES * CONTEXT) for (name,), seconds in times.items()}


def train(engines: Engines, args: argparse.Namespace, _results: dict) -> dict:
    """Steps of training a drafter from the same weights on the same inputs, each side in a fresh process."""
    context = engines.tokens(CONTEXT)
    path = environment.WORK / "train.safetensors"
    dumping = engines.start_deepspec()
    config = SHAPE | dumping.ask("dump", context=context, path=str(path), **SHAPE)
    engines.stop(dumping)
    ours = Side("deepspec f32", engines.start_deepspec(), SHAPE | {"context": context})
    theirs = Side("torch f32", engines.start_peer("torch"), {"file": str(path), "config": config})
    start_bytes = theirs.process.ask("info")["start_bytes"]
    steps: dict[str, list[dict]] = {ours.name: [], theirs.name: []}
    for turn in range(1 + max(args.rounds, 2)):
        for side in (ours, theirs) if turn % 2 else (theirs, ours):
            steps[side.name].append(side.ask("train", repeats=1))
    for side in (ours, theirs):
        engines.stop(side.process)
    path.unlink()
    check_training(steps[ours.name], steps[theirs.name])
    step = {name: train_summary(found) for name, found in steps.items()}
    step[theirs.name]["start_bytes"] = start_bytes
    return {"shape": SHAPE | {"context": CONTEXT}, "step": step, "scaling": scaling(engines, args.rounds)}


def train_summary(steps: list[dict]) -> dict:
    """Times without the first step, which warms up; peak memory after all of them."""
    seconds = [second for step in steps[1:] for second in step["seconds"]]
    losses = [loss for step in steps for loss in step["losses"]]
    return summary(seconds) | {"peak_bytes": steps[-1]["peak_bytes"], "losses": losses[:3]}


def check_training(ours: list[dict], theirs: list[dict]) -> None:
    """Both sides must train the same: losses of the first steps and the first gradient norm agree."""
    pairs = [(a["losses"][0], b["losses"][0], LOSS_TOLERANCE) for a, b in zip(ours[:3], theirs[:3])]
    pairs.append((ours[0]["grad_norms"][0], theirs[0]["grad_norms"][0], NORM_TOLERANCE))
    for a, b, tolerance in pairs:
        if abs(a - b) > tolerance * abs(a):
            raise SystemExit(f"the sides do not train the same: deepspec {a}, torch {b}")


def scaling(engines: Engines, rounds: int) -> list[dict]:
    """deepspec alone: a step at several numbers of anchors and vocabularies, each in a process of its own."""
    context = engines.tokens(CONTEXT)
    sides = [Side("", engines.start_deepspec(), shape | {"context": context}) for shape in OTHER_SHAPES]
    for side in sides:
        side.ask("train", repeats=1)
    cells = [((i,), side, "train", {"repeats": 1}) for i, side in enumerate(sides)]
    times = alternate(cells, max(rounds, 2))
    found = []
    for (i,), seconds in times.items():
        size = {"anchors": OTHER_SHAPES[i]["anchors"], "vocab": OTHER_SHAPES[i]["vocab"]}
        peak = sides[i].ask("train", repeats=0)["peak_bytes"]
        found.append(size | summary(seconds) | {"peak_bytes": peak})
        engines.stop(sides[i].process)
    return found


def speculation(engines: Engines, args: argparse.Namespace, results: dict) -> dict:
    """deepspec's evaluation against llama.cpp's plain decoding of the same prompts."""
    decoding = results.get("decode") or decode(engines, argparse.Namespace(rounds=2), {})
    return spec.compare(engines, args.eval_results, decoding)


ITEMS = {
    "decode": decode,
    "verify": verify,
    "prefill": prefill,
    "prepare": prepare,
    "train": train,
    "spec": speculation,
}
