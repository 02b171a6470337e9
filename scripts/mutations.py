#!/usr/bin/env python3
"""Seeded mistakes: builds the project with one mistake at a time and shows that a named test fails.

Usage: scripts/mutations.py [--list] [--only NAME ...] [--lock FILE] [--write docs/mutations.md]

The committed state is cloned to target/mutations/tree and built into target/mutations/target, which starts as a copy of target where
there is one. First every test that is to catch a mistake has to pass on the tree as it is; then each mistake is put in, by itself,
and its test has to fail. A mistake whose place is not found, or that does not build, is an error of this script, and so is one that no
test catches. --lock FILE takes that lock around every build, where several builds share a machine. --write keeps the table.
"""

import argparse
import contextlib
import datetime
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "target" / "mutations"
TREE = BASE / "tree"
# Mistakes that are built before others who want the lock have their turn.
AT_ONCE = 4


@dataclass(frozen=True)
class Test:
    """A test by its package, binary (`--lib` or the name of an integration test) and path."""

    package: str
    binary: str
    name: str

    def selection(self) -> list[str]:
        target = ["--lib"] if self.binary == "--lib" else ["--test", self.binary]
        return ["-p", self.package, *target]

    def __str__(self) -> str:
        binary = "" if self.binary == "--lib" else f"{self.binary}::"
        return f"{self.package.removeprefix('deepspec-')}: {binary}{self.name}"


@dataclass(frozen=True)
class Mutation:
    """A mistake: `old` stands once in `file` and becomes `new`."""

    name: str
    what: str
    file: str
    old: str
    new: str
    test: Test


GOLDEN = "golden_{}_forward_losses_metrics_and_gradients"


def models(binary: str, name: str) -> Test:
    return Test("deepspec-models", binary, name)


def stages(binary: str, name: str) -> Test:
    return Test("deepspec-stages", binary, name)


MUTATIONS = [
    Mutation(
        "markov_rows", "the Markov head reads the row after that of the previous token",
        "models/src/draft/markov_head.rs",
        "        embed(&self.markov_w1, previous)",
        "        let rows = self.markov_w1.dims()[0] as u32;\n"
        "        let previous: Vec<u32> = previous.iter().map(|token| (token + 1) % rows).collect();\n"
        "        embed(&self.markov_w1, &previous)",
        models("golden", GOLDEN.format("dspark_vanilla")),
    ),
    Mutation(
        "anchor_token", "a training block starts from the token after its anchor",
        "models/src/draft/dspark.rs",
        "sequence.tokens.get(anchor).copied()",
        "sequence.tokens.get(anchor + 1).copied()",
        models("golden", GOLDEN.format("dflash")),
    ),
    Mutation(
        "anchor_context", "a training block sees its anchor's features",
        "models/src/draft/dspark.rs",
        "anchor.min(sequence.tokens.len())",
        "(anchor + 1).min(sequence.tokens.len())",
        models("golden", GOLDEN.format("dspark_gated")),
    ),
    Mutation(
        "anchor_candidates", "a position may be an anchor without being supervised itself",
        "models/src/loss/dspark.rs",
        "filter(|&p| loss_mask[p] == 1 && loss_mask[p + 1] == 1)",
        "filter(|&p| loss_mask[p + 1] == 1)",
        models("golden", "anchors_are_supervised_and_followed_by_a_supervised_token"),
    ),
    Mutation(
        "gate", "the confidence gate lets the first token below the threshold through",
        "stages/engine/src/draft.rs",
        "proposal.confidence_logits.iter().position(low).unwrap_or(proposal.tokens.len())",
        "proposal.confidence_logits.iter().position(low).map_or(proposal.tokens.len(), |k| k + 1)",
        stages("decode", "golden_decode_traces_dspark_vanilla"),
    ),
    Mutation(
        "residual", "a rejected token is replaced by a draw from the target's distribution, not from the residual",
        "models/src/speculate/verify.rs",
        "residual(&target, draft)?.sample(uniform(Stream::Target, k))",
        "target.sample(uniform(Stream::Target, k))",
        models("--lib", "speculate::tests::text_has_the_targets_distribution_whatever_the_drafter"),
    ),
    Mutation(
        "accept_ratio", "the acceptance ratio is inverted",
        "models/src/speculate/verify.rs",
        "f64::from(target.prob(token)) / f64::from(draft.prob(token)).max(DRAFT_PROB_FLOOR)",
        "f64::from(draft.prob(token)) / f64::from(target.prob(token)).max(DRAFT_PROB_FLOOR)",
        models("--lib", "speculate::tests::golden_acceptance_and_residuals"),
    ),
    Mutation(
        "bonus_row", "the bonus token comes from the row before the last",
        "models/src/speculate/verify.rs",
        "target(tokens.len())?.sample(",
        "target(tokens.len().saturating_sub(1))?.sample(",
        models("--lib", "speculate::tests::text_has_the_targets_distribution_whatever_the_drafter"),
    ),
    Mutation(
        "loss_mask", "the loss mask is one token too long",
        "datasets/src/renderer.rs",
        "let end = tokens.partition_point(|(_, bytes)| bytes.end <= answer.bytes.end);",
        "let end = (tokens.partition_point(|(_, bytes)| bytes.end <= answer.bytes.end) + 1).min(tokens.len());",
        Test("deepspec-datasets", "text", "rendering::answers_with_their_end_token_are_supervised"),
    ),
    Mutation(
        "rope_training", "RoPE of a training block is one position ahead of its context",
        "models/src/draft/dspark.rs",
        "block_positions.extend(position..position + size);",
        "block_positions.extend(position + 1..position + 1 + size);",
        models("golden", GOLDEN.format("dspark_rnn")),
    ),
    Mutation(
        "rope_drafting", "RoPE of a drafted block is one position ahead of its context",
        "models/src/draft/context.rs",
        "            segments.push(Segment { slot, start: cache.len(slot), len: size });\n        }\n"
        "        let positions: Vec<usize> = segments.iter().flat_map(|s| s.start..s.start + s.len).collect();",
        "            segments.push(Segment { slot, start: cache.len(slot), len: size });\n        }\n"
        "        let positions: Vec<usize> = segments.iter().flat_map(|s| s.start + 1..=s.start + s.len).collect();",
        stages("decode", "golden_decode_traces_dflash"),
    ),
    Mutation(
        "rollback", "the cache keeps the row of the first rejected token",
        "stages/engine/src/round.rs",
        "let length = self.cache.len(sequence.slot) - row_count + kept;",
        "let length = (self.cache.len(sequence.slot) - row_count + kept + 1).min(self.cache.len(sequence.slot));",
        stages("decode", "speculation_and_batching_change_no_token"),
    ),
    Mutation(
        "feature_layer", "the features of layer i are those of layer i + 1",
        "models/src/target.rs",
        "keep(i as i32, &x);",
        "keep(i as i32 - 1, &x);",
        models("golden", "golden_target_hidden_states_and_logits"),
    ),
    Mutation(
        "sts_position", "a confidence is scaled by the temperature of the next position",
        "models/src/speculate/calibrate.rs",
        "for (logit, temperature) in logits.iter_mut().zip(&self.0) {\n            *logit /= temperature;",
        "for (logit, temperature) in logits.iter_mut().zip(self.0.iter().skip(1).chain(&self.0)) {\n            *logit /= temperature;",
        models("--lib", "speculate::calibrate::tests::temperatures_of_another_block_or_zero_are_refused"),
    ),
    Mutation(
        "argmax", "the largest of equal logits is the last one",
        "kernels/src/logit_row.rs",
        "else { position(row, maximum) };",
        "else { row.iter().rposition(|value| *value == maximum) };",
        Test("deepspec-kernels", "--lib", "logit_row::tests::argmax_is_the_first_maximum"),
    ),
    Mutation(
        "kept_features", "features that wait for a resting drafter are views of whole steps",
        "stages/engine/src/sequence.rs",
        "self.unseen.push(rows.force_contiguous()?);",
        "self.unseen.push(rows.clone());",
        Test("deepspec-serve", "soak", "memory_stays_flat_where_long_prompts_run_beside_a_resting_drafter"),
    ),
    Mutation(
        "planned_length", "how much is verified is decided by the number of tokens drawn, which a drafted stop token cuts",
        "stages/engine/src/draft.rs",
        "let planned = if is_lookup { proposal.tokens.len() } else { slots };",
        "let planned = proposal.tokens.len();",
        stages("lossless", "eagle3_is_lossless_when_its_proposals_end_at_stop_tokens"),
    ),
]


@contextlib.contextmanager
def locked(path: str | None):
    if path is None:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def environment() -> dict[str, str]:
    values = {**os.environ, "CARGO_TARGET_DIR": str(BASE / "target"), "CARGO_INCREMENTAL": "1", "RUST_BACKTRACE": "0"}
    for name in ("DEEPSPEC_GOLDEN", "DEEPSPEC_SOAK_MINUTES"):
        values.pop(name, None)
    return values


def build(test: Test, copy: str) -> tuple[tuple[Path, Path] | None, str]:
    """A copy of the test's program with the folder that it runs in, and what the compiler said."""
    command = ["cargo", "test", "--release", "--no-run", "--message-format", "json-render-diagnostics", *test.selection()]
    built = subprocess.run(command, cwd=TREE, env=environment(), text=True, capture_output=True)
    if built.returncode != 0:
        return None, built.stderr
    messages = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
    name = test.package.replace("-", "_") if test.binary == "--lib" else test.binary
    is_wanted = lambda message: message.get("executable") and message["profile"]["test"] and message["target"]["name"] == name
    program = BASE / "programs" / copy
    program.parent.mkdir(exist_ok=True)
    message = next(message for message in messages if is_wanted(message))
    shutil.copy2(message["executable"], program)
    return (program, Path(message["manifest_path"]).parent), built.stderr


def run(built: tuple[Path, Path], test: Test, names: list[str]) -> tuple[set[str], str]:
    """The tests that failed of those named, and the output."""
    program, folder = built
    ran = subprocess.run([program, "--exact", *names], cwd=folder, env=environment(), text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    program.unlink()
    results = dict(re.findall(r"^test (\S+) \.\.\. (\w+)", ran.stdout, re.MULTILINE))
    missing = [name for name in names if name not in results]
    if missing:
        sys.exit(f"error: {test.package} has no test {', '.join(missing)}\n{ran.stdout}")
    return {name for name in names if results[name] == "FAILED"}, ran.stdout


def prepare() -> str:
    """The clone at the committed state; its commit."""
    BASE.mkdir(parents=True, exist_ok=True)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    if not TREE.exists():
        subprocess.run(["git", "clone", "--quiet", "--no-checkout", str(ROOT), str(TREE)], check=True)
    subprocess.run(["git", "fetch", "--quiet", str(ROOT), commit], cwd=TREE, check=True)
    subprocess.run(["git", "checkout", "--quiet", "--force", "--detach", commit], cwd=TREE, check=True)
    built = ROOT / "target" / "release"
    if not (BASE / "target").exists() and built.exists():
        print("copying what is built ...", flush=True)
        for part in ("build", "deps", ".fingerprint"):
            shutil.copytree(built / part, BASE / "target" / "release" / part, symlinks=True)
    return commit


def check_places(mutations: list[Mutation]) -> None:
    for mutation in mutations:
        count = (TREE / mutation.file).read_text().count(mutation.old)
        if count != 1:
            sys.exit(f"error: {mutation.name}: its place stands {count} times in {mutation.file}, expected once")


def baseline(mutations: list[Mutation], lock: str | None) -> None:
    """All tests pass on the tree as it is."""
    groups: dict[tuple[str, str], dict[str, Test]] = {}
    for mutation in mutations:
        groups.setdefault((mutation.test.package, mutation.test.binary), {})[mutation.test.name] = mutation.test
    with locked(lock):
        built = [build(next(iter(tests.values())), f"{number}") for number, tests in enumerate(groups.values())]
    for (program, output), tests in zip(built, groups.values()):
        if program is None:
            sys.exit(f"error: the tree does not build as it is\n{output}")
        failed, output = run(program, next(iter(tests.values())), list(tests))
        if failed:
            sys.exit(f"error: without a mistake, {', '.join(failed)} fails\n{output}")
        print(f"passes as it is: {', '.join(str(test) for test in tests.values())}", flush=True)


def build_with(mutation: Mutation) -> tuple[tuple[Path, Path] | None, str]:
    """The test's program with the mistake in it."""
    path = TREE / mutation.file
    original = path.read_text()
    path.write_text(original.replace(mutation.old, mutation.new))
    try:
        return build(mutation.test, mutation.name)
    finally:
        path.write_text(original)


def table(caught: list[Mutation], commit: str) -> str:
    today = datetime.date.today().isoformat()
    rows = "".join(f"| {m.name} | {m.what} (`{m.file}`) | {m.test} |\n" for m in caught)
    return (
        "# Seeded mistakes\n\n"
        "A test that cannot fail shows nothing. Each of these mistakes was put into the program by itself, and the named\n"
        "test, which passes without it, failed. `scripts/mutations.py` does it again.\n\n"
        f"Last run: {today}, commit {commit[:12]}.\n\n"
        "| mistake | what it changes | test that catches it |\n| --- | --- | --- |\n" + rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the mistakes and stop")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="mistakes by name")
    parser.add_argument("--lock", metavar="FILE", help="lock held around every build")
    parser.add_argument("--write", metavar="FILE", help="write the table there when all were caught")
    arguments = parser.parse_args()
    known = {mutation.name for mutation in MUTATIONS}
    unknown = set(arguments.only or ()) - known
    if unknown:
        sys.exit(f"error: no mistake is called {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    mutations = [mutation for mutation in MUTATIONS if not arguments.only or mutation.name in arguments.only]
    if arguments.list:
        for mutation in mutations:
            print(f"{mutation.name}: {mutation.what} ({mutation.test})")
        return
    commit = prepare()
    check_places(mutations)
    baseline(mutations, arguments.lock)
    caught, faults = [], []
    for first in range(0, len(mutations), AT_ONCE):
        some = mutations[first:first + AT_ONCE]
        with locked(arguments.lock):
            built = [build_with(mutation) for mutation in some]
        for mutation, (program, output) in zip(some, built):
            if program is None:
                verdict = f"DOES NOT BUILD\n{output}"
            elif run(program, mutation.test, [mutation.test.name])[0]:
                verdict = f"caught by {mutation.test}"
            else:
                verdict = "NOT CAUGHT"
            (caught if verdict.startswith("caught") else faults).append(mutation)
            print(f"{mutation.name:20} {verdict}", flush=True)
    if faults:
        sys.exit(f"error: {len(faults)} of {len(mutations)} mistakes were not caught")
    print(f"all {len(caught)} mistakes were caught")
    if arguments.write:
        Path(arguments.write).write_text(table(caught, commit))


if __name__ == "__main__":
    main()
