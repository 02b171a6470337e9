"""Ratios of a comparison, and its table for people."""

import argparse
from pathlib import Path

READING = (
    "`a_vs_b` tells how many times faster (memory: smaller) deepspec is, each engine in its best variant unless the "
    "name says otherwise; above 1 deepspec is ahead. `verifyN_over_1` is the time of a step of N rows over that of one "
    "row, in deepspec's fastest precision. `spec_over_plain` is tokens per second over plain decoding, per domain."
)
# Formats that hold weights alike.
PAIRS = [("bf16", "F16"), ("q8", "Q8_0"), ("q8", "Q4_1"), ("q4", "Q4_1")]


def command(args: argparse.Namespace) -> str:
    """The command line without folders."""
    words = ["scripts/bench_peers"]
    for name, value in vars(args).items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", value.name if isinstance(value, Path) else str(value)]
    return " ".join(words)


def best(found: dict[str, dict], engine: str) -> tuple[str, float] | None:
    """An engine's fastest variant and its seconds."""
    times = {name: result["median_s"] for name, result in found.items() if name.startswith(engine)}
    return min(times.items(), key=lambda item: item[1]) if times else None


def faster(found: dict[str, dict], ours: str, theirs: str) -> float:
    """How many times faster one is than the other, each at its best."""
    return best(found, theirs)[1] / best(found, ours)[1]


def ratios(results: dict) -> dict:
    """The headline numbers of the items that were measured."""
    found: dict = {}
    if decode := results.get("decode"):
        found["decode_vs_llamacpp"] = faster(decode, "deepspec", "llama.cpp")
    if prefill := results.get("prefill"):
        found["prefill_vs_llamacpp"] = faster(prefill["512"], "deepspec", "llama.cpp")
        found["prefill_f32_vs_torch"] = faster(prefill["512"], "deepspec f32", "torch")
    if verify := results.get("verify"):
        name, one = best(verify["1"], "deepspec")
        for rows in ("8", "4"):
            found[f"verify{rows}_over_1"] = verify[rows][name]["median_s"] / one
    if train := results.get("train"):
        ours, theirs = train["step"]["deepspec f32"], train["step"]["torch f32"]
        found["train_step_vs_torch"] = theirs["median_s"] / ours["median_s"]
        found["train_memory_vs_torch"] = theirs["peak_bytes"] / ours["peak_bytes"]
    if prepare := results.get("prepare"):
        found["prepare_vs_torch"] = faster(prepare, "deepspec", "torch")
    if spec := results.get("spec"):
        domains = spec["domains"].items()
        found["spec_over_plain"] = {
            name: {proposer: value["value"] for proposer, value in domain["spec_over_plain"].items()}
            for name, domain in domains
        }
        found["spec_vs_llamacpp"] = {name: spec_vs_llamacpp(domain["tokens_per_s"]) for name, domain in domains}
    return found


def spec_vs_llamacpp(rates: dict[str, float]) -> float:
    """deepspec's fastest speculative decoding over llama.cpp's plain decoding."""
    speculative = [r for name, r in rates.items() if name.startswith("deepspec") and name != "deepspec plain" and r]
    return max(speculative) / rates["llama.cpp plain"]


def ratios_by_variant(results: dict) -> dict:
    """The same for each precision and format, prompt length and number of rows."""
    found: dict = {}
    tables = {"decode": results.get("decode", {})}
    tables |= {f"prefill_{length}": table for length, table in results.get("prefill", {}).items()}
    for item, table in tables.items():
        for ours, theirs in PAIRS:
            pair = f"deepspec {ours}", f"llama.cpp {theirs}"
            if all(name in table for name in pair):
                found[f"{item}_{ours}_vs_{theirs}"] = faster(table, *pair)
        if "torch f32" in table:
            found[f"{item}_f32_vs_torch"] = faster(table, "deepspec f32", "torch f32")
    if verify := results.get("verify"):
        for name, one in verify["1"].items():
            for rows in ("2", "4", "8", "16"):
                found[f"verify{rows}_over_1 {name}"] = verify[rows][name]["median_s"] / one["median_s"]
    if prepare := results.get("prepare"):
        for name in (name for name in prepare if name.startswith("deepspec")):
            found[f"prepare {name} vs torch"] = faster(prepare, name, "torch")
    return found


def table(document: dict) -> str:
    """Everything measured, for a terminal."""
    lines: list[str] = []
    for item, found in document["measurements"].items():
        lines += ["", item, *ITEM_LINES[item](found)]
    lines += ["", "ratios (deepspec is ahead above 1; verifyN_over_1: lower is better)"]
    for name, value in document["ratios"].items():
        lines += ratio_lines(name, value)
    return "\n".join(lines[1:])


def ratio_lines(name: str, value: float | dict) -> list[str]:
    """A ratio, or one per domain."""
    if isinstance(value, float):
        return [f"  {name:34} {value:6.2f}"]
    return [line for key, inner in value.items() for line in ratio_lines(f"{name} {key}", inner)]


def timing_lines(found: dict[str, dict]) -> list[str]:
    """One line per variant."""
    return [
        f"  {name:24} {r['median_s'] * 1e3:9.2f} ms  [{r['min_s'] * 1e3:.2f}, {r['max_s'] * 1e3:.2f}] n={r['n']}"
        + (f"  {r['tokens_per_s']:9.1f} tokens/s" if "tokens_per_s" in r else "")
        + ("  flash attention" if r.get("flash_attention") else "")
        for name, r in found.items()
    ]


def grouped_lines(found: dict[str, dict]) -> list[str]:
    """Variants under their number of rows or tokens."""
    return [line for size, table in found.items() for line in [f" {size} tokens", *timing_lines(table)]]


def train_lines(found: dict) -> list[str]:
    """Step times with memory, then what deepspec's step costs at other sizes."""
    lines = [
        f"{line}  peak {result['peak_bytes'] / 1e9:.2f} GB"
        for line, result in zip(timing_lines(found["step"]), found["step"].values())
    ]
    for r in found["scaling"]:
        size = f"{r['anchors']} anchors, {r['vocab']} tokens"
        lines.append(f"  {size:26} {r['median_s'] * 1e3:7.0f} ms  peak {r['peak_bytes'] / 1e9:.2f} GB")
    return lines


def spec_lines(found: dict) -> list[str]:
    """Tokens per second per domain."""
    return [
        f"  {name:10} " + "  ".join(f"{who} {rate:.1f}" for who, rate in domain["tokens_per_s"].items() if rate)
        for name, domain in found["domains"].items()
    ]


ITEM_LINES = {
    "decode": timing_lines,
    "verify": grouped_lines,
    "prefill": grouped_lines,
    "prepare": timing_lines,
    "train": train_lines,
    "spec": spec_lines,
}
