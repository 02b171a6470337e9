"""Speculative decoding as `deepspec eval` measured it, beside llama.cpp's plain decoding of the same prompts."""

import hashlib
import json
import random
import struct
from pathlib import Path

import environment
from engines import Engines

BUILT_IN = environment.ROOT / "datasets" / "prompts" / "eval.jsonl"


def check(path: Path) -> tuple[dict, dict]:
    """An evaluation that can be compared with, and its results at temperature 0; before anything is measured."""
    evaluation = json.loads(path.read_text())
    settings = evaluation["recipe"]["eval"]
    if settings.get("batch_size", 1) != 1:
        raise SystemExit("the evaluation ran several prompts at once; llama.cpp's plain decoding runs one")
    for source in settings["prompts"]:
        if not prompt_file(source).is_file():
            raise SystemExit(f"the evaluation's prompts `{source}` are not here; run this where the evaluation ran")
    result = next((t for t in evaluation["temperatures"] if t["temperature"] == 0), None)
    if result is None:
        raise SystemExit(f"`{path.name}` has no results at temperature 0")
    return evaluation, result


def prompt_file(source: str) -> Path:
    """The file of a set of prompts."""
    return BUILT_IN if source == "built-in" else Path(source)


def compare(engines: Engines, path: Path, decoding: dict) -> dict:
    """Tokens per second and speedups per domain; `decoding` tells which of llama.cpp's variants decodes fastest."""
    evaluation, result = check(path)
    settings = evaluation["recipe"]["eval"]
    prompts = rendered(engines, evaluation)
    side = fastest(engines, decoding)
    spent: dict[str, list[tuple[int, float]]] = {}
    for prompt in prompts:
        request = {"tokens": prompt["tokens"], "stop_ids": prompt["stop_ids"], "count": settings["max_new_tokens"]}
        answer = side.ask("answer", **request)
        for group in filter(None, ("all", prompt["domain"])):
            spent.setdefault(group, []).append((len(answer["tokens"]), answer["seconds"]))
    groups = [result["all"], *result["domains"]]
    return {
        "commit": evaluation["origin"]["git_commit"],
        "precision": evaluation["recipe"]["target"]["precision"],
        "llamacpp": side.name,
        "max_new_tokens": settings["max_new_tokens"],
        "domains": {group["name"]: domain(group, spent[group["name"]]) for group in groups},
    }


def domain(group: dict, spent: list[tuple[int, float]]) -> dict:
    """The numbers of one domain."""
    proposers = {proposer["name"]: proposer for proposer in group["proposers"]}
    speedups = {name: proposer["speedup"] for name, proposer in proposers.items() if proposer["speedup"]}
    rates = {f"deepspec {name}": proposer["speed"]["tokens_per_s"] for name, proposer in proposers.items()}
    tokens, seconds = (sum(values) for values in zip(*spent))
    return {
        "prompts": group["prompts"],
        "tokens_per_s": rates | {"llama.cpp plain": tokens / seconds},
        "spec_over_plain": {name: speedup["totals"] for name, speedup in speedups.items()},
    }


def fastest(engines: Engines, decoding: dict):
    """llama.cpp's variant with the lowest time per token."""
    rates = {name: found for name, found in decoding.items() if name.startswith("llama.cpp")}
    name = min(rates, key=lambda name: rates[name]["median_s"])
    wanted = name + (" flash" if rates[name]["flash_attention"] else "")
    return next(side for side in engines.llama_sides if side.name == wanted)


def rendered(engines: Engines, evaluation: dict) -> list[dict]:
    """The evaluation's prompts as tokens; their hash must be the evaluation's."""
    settings, digest, prompts = evaluation["recipe"]["eval"], hashlib.sha256(), []
    for source in settings["prompts"]:
        path = prompt_file(source)
        name = "built-in" if source == "built-in" else path.stem
        for index, row in enumerate(rows(path, settings["limit"], settings["seed"])):
            prompt = engines.deepspec.ask("render", text=row["turns"][0])
            tokens = prompt["tokens"]
            digest.update(f"{name}\0{index}\0{len(tokens)}\0".encode() + struct.pack(f"<{len(tokens)}I", *tokens))
            prompts.append(prompt | {"domain": row.get("domain")})
    if digest.hexdigest() != evaluation["prompt_ids_sha256"]:
        raise SystemExit("the prompts found are not those of the evaluation")
    return prompts


def rows(path: Path, limit: int | None, seed: int) -> list[dict]:
    """The rows that an evaluation takes of a file: shuffled only when there are more than wanted."""
    found = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    if limit is not None and limit < len(found):
        random.Random(seed).shuffle(found)
        found = found[:limit]
    return found
