"""The runs behind a comparison: one cache, then timing, training and evaluation of each recipe, each skipped when done."""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import json_file

# Steps of a timing that warm up and do not count.
WARM_UP = 2
# Acceptance is the same in any batch; speed is that of one sequence alone.
EVALUATIONS = {
    "whole": ["eval.adaptive=false", "eval.batch_size=16", 'eval.proposers=["plain", "ngram", "draft", "hybrid"]'],
    "adaptive": ["eval.adaptive=true", "eval.batch_size=1", 'eval.proposers=["plain", "ngram", "draft", "hybrid"]'],
}


class Failure(Exception):
    """Something that the user has to know."""


class Drafter:
    """One recipe of the comparison."""

    def __init__(self, path: Path, args: argparse.Namespace):
        self.path = path
        try:
            self.recipe = tomllib.loads(path.read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise Failure(f"recipe {path}: {error}") from None
        self.name = f"{path.parent.name}_{path.stem}"
        self.algorithm = self.recipe["draft"]["algorithm"]
        self.args = args
        self.run = args.work / self.name

    def stage(self, command: str, folder: Path, overrides: list[str], *more: object) -> None:
        """Runs one command of deepspec on this recipe."""
        words = [self.args.deepspec, command, "--recipe", self.path, "--run", folder, "--no-progress", *more]
        for override in [*self.args.overrides, *overrides]:
            words += ["--set", override]
        call(words)

    def steps(self, cache: Path) -> tuple[int, dict]:
        """Number of steps that take the wanted minutes, and the timing that says so."""
        record = self.args.work / f"timing_{self.name}.json"
        if record.is_file():
            timing = json.loads(record.read_text())
        else:
            folder, count = self.args.work / f"timing_{self.name}", self.args.timing_steps
            settings = [f"train.steps={count}", "train.log_every=1", f"train.checkpoint_every={count}",
                        "train.keep_checkpoints=1", "train.acceptance_every=none"]
            # A timing that was cut short is taken again from its start.
            shutil.rmtree(folder, ignore_errors=True)
            self.stage("train", folder, settings, "--cache", cache)
            timing = self.timing(metrics(folder), count)
            shutil.rmtree(folder)
            json_file.write(record, timing)
        return max(1, round(60e3 * self.args.minutes / timing["step_ms"])), timing

    def timing(self, records: list[dict], count: int) -> dict:
        """Expected time of a step: medians per phase of the loss, weighted by the phases' shares of the run."""
        phases, begun, expected = [], 0.0, 0.0
        ends = [phase["until"] for phase in self.recipe["train"]["phases"]]
        timed = [record for record in records if record["step"] > WARM_UP]
        for end in ends:
            times = [record["step_ms"] for record in timed if begun <= (record["step"] - 1) / count < end]
            # A phase too short for the timing counts like all steps together.
            median = statistics.median(times or [record["step_ms"] for record in timed])
            phases.append({"until": end, "steps": len(times), "median_ms": median})
            expected += (end - begun) * median
            begun = end
        return {"steps": count, "phases": phases, "step_ms": expected}

    def train(self, cache: Path, steps: int) -> list[dict]:
        """Trains to the end, or goes on; the records of the log."""
        if not (self.run / "checkpoints" / f"step-{steps:06}").is_dir():
            every = max(1, steps // self.args.measurements)
            settings = [f"train.steps={steps}", f"train.acceptance_every={every}"]
            self.stage("train", self.run, settings, "--cache", cache)
        return metrics(self.run)

    def evaluate(self, steps: int) -> dict[str, dict]:
        """Both evaluations of the trained drafter."""
        args, found = self.args, {}
        folder = self.run / "compare"
        more: list[object] = ["--calibrate", "--out", folder]
        for path in args.eval or []:
            more += ["--prompts", path]
        if args.eval_limit:
            more += ["--limit", args.eval_limit]
        training = [f"train.steps={steps}"]
        for name, settings in EVALUATIONS.items():
            kept = folder / f"{name}.json"
            if not kept.is_file():
                temperatures = f"eval.temperatures={args.temperatures}"
                self.stage("eval", self.run, [*training, *settings, temperatures], *more)
                shutil.copy(folder / "results.json", kept.with_suffix(".part"))
                kept.with_suffix(".part").rename(kept)
                for diagram in folder.glob("reliability_*.svg"):
                    shutil.copy(diagram, folder / f"{name}_{diagram.name}")
            found[name] = json.loads(kept.read_text())
        return found


def compare(args: argparse.Namespace) -> dict:
    """Everything that was measured."""
    need_program(args.deepspec)
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    drafters = [Drafter(path, args) for path in args.recipes]
    names = [drafter.name for drafter in drafters]
    if len(set(names)) < len(names):
        raise Failure(f"two recipes have the same folder and file name: {', '.join(names)}")
    settled(args, names)
    cache, layers = prepare(drafters, args)
    return {
        "minutes": args.minutes,
        "temperatures": args.temperatures,
        "overrides": args.overrides,
        "prompts": args.prompts.name if args.prompts else None,
        "cache": cache_facts(cache, layers),
        "drafters": [result(drafter, cache) for drafter in drafters],
    }


def need_program(deepspec: Path) -> None:
    if not deepspec.is_file():
        raise Failure(f"there is no program {deepspec}: `cargo build --release` makes it")


def settled(args: argparse.Namespace, names: list[str]) -> None:
    """Refuses to mix two comparisons in one work folder; recipes may be added to one."""
    asked = {
        "recipes": names, "minutes": args.minutes, "overrides": args.overrides, "samples": args.samples,
        "prompts": str(args.prompts) if args.prompts else None, "temperatures": args.temperatures,
        "eval": [str(path) for path in args.eval or []], "eval_limit": args.eval_limit,
        "measurements": args.measurements, "timing_steps": args.timing_steps,
    }
    record = args.work / "comparison.json"
    if record.is_file():
        known = json.loads(record.read_text())
        differing = [f"{key} was {known.get(key)}, is {value}" for key, value in asked.items()
                     if known.get(key) != value and not (key == "recipes" and set(known[key]) <= set(value))]
        if differing:
            raise Failure(f"{args.work} holds another comparison: {'; '.join(differing)}; give another --work")
    json_file.write(record, asked)


def prepare(drafters: list[Drafter], args: argparse.Namespace) -> tuple[Path, list[int]]:
    """The cache that all train on: with every layer that one of them reads."""
    layers: set[int] = set()
    for drafter in drafters:
        ids = drafter.recipe["draft"]["target_layer_ids"]
        if not isinstance(ids, list):
            raise Failure(f"{drafter.path} has target_layer_ids = {ids!r}: a shared cache needs them as a list")
        layers.update(ids)
    folder = args.work / "prepared"
    if not (folder / "cache" / "manifest.json").is_file():
        more: list[object] = []
        if args.prompts:
            more += ["--prompts", args.prompts]
        if args.samples:
            more += ["--limit", args.samples]
        drafters[0].stage("prepare", folder, [f"draft.target_layer_ids={sorted(layers)}"], *more)
    return folder / "cache", sorted(layers)


def cache_facts(cache: Path, layers: list[int]) -> dict:
    manifest = json.loads((cache / "manifest.json").read_text())
    return {"layers": layers, **{key: manifest[key] for key in ("samples", "tokens", "supervised_tokens") if key in manifest}}


def result(drafter: Drafter, cache: Path) -> dict:
    """All numbers of one drafter."""
    steps, timing = drafter.steps(cache)
    records = drafter.train(cache, steps)
    found = drafter.evaluate(steps)
    batch = drafter.recipe["train"]["batch_size"]
    for override in drafter.args.overrides:
        key, _, value = override.partition("=")
        batch = int(value) if key.strip() == "train.batch_size" else batch
    measured = curve(records, batch)
    return {
        "name": drafter.name,
        "algorithm": drafter.algorithm,
        "timing": timing,
        "steps": steps,
        "sequences": steps * batch,
        "minutes": minutes(records),
        "curve": measured,
        **found,
    }


def minutes(records: list[dict]) -> float:
    """Time of the steps that the log holds."""
    befores = [0, *(record["step"] for record in records)]
    return sum(record["step_ms"] * (record["step"] - before) for record, before in zip(records, befores)) / 60e3


def curve(records: list[dict], batch: int) -> list[dict]:
    """The measurements of acceptance of a log, over steps, sequences and minutes."""
    return [{"step": record["step"], "sequences": record["step"] * batch, "minutes": minutes(records[:i + 1]),
             "tau": record["decode_tau"], "accept@1": record["decode_accept@1"]}
            for i, record in enumerate(records) if "decode_tau" in record]


def metrics(run: Path) -> list[dict]:
    """The records of a run's log."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def call(words: list[object]) -> None:
    """Runs a program, its words on the terminal; its results go to the reports."""
    texts = [str(word) for word in words]
    print("$", *texts, file=sys.stderr, flush=True)
    done = subprocess.run(texts, stdout=subprocess.DEVNULL, check=False)
    if done.returncode == 130:
        raise Failure("interrupted; the same command goes on from there")
    if done.returncode != 0:
        raise Failure(f"`{texts[1]}` ended with code {done.returncode}")
