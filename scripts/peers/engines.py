"""The engines side by side: their processes, the variants of each, and whether all compute the same model."""

import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import environment
from protocol import Process

HERE = Path(__file__).resolve().parent
# The file as it is, and what llama.cpp makes of it.
FORMATS = ["Q4_1", "Q8_0", "F16"]
CHECK_TEXTS = ["The capital of France is", "def fibonacci(n):\n    ", "Water boils at a temperature of"]
CHECK_TOKENS = 16
PROMPTS = environment.ROOT / "datasets" / "prompts" / "train.jsonl"


@dataclass
class Side:
    """One engine in one variant: what is asked of which process."""

    name: str
    process: Process
    fields: dict = field(default_factory=dict)

    def ask(self, op: str, **request) -> dict:
        """Asks with the variant's fields."""
        return self.process.ask(op, **self.fields, **request)


class Engines:
    """Processes of all engines, started when first needed and ended with the `with` block."""

    def __init__(self, model: Path, python: Path, threads: int):
        self.model, self.python, self.threads = model, python, threads
        self.env = dict(os.environ, RAYON_NUM_THREADS=str(threads), OMP_NUM_THREADS=str(threads))
        self.running: list[Process] = []
        environment.WORK.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *_error) -> None:
        for process in list(self.running):
            self.stop(process)

    def stop(self, process: Process) -> None:
        """Ends a process."""
        self.running.remove(process)
        process.close()

    def start(self, name: str, command: list[str]) -> Process:
        """A fresh process."""
        process = Process(name, command, environment.WORK / f"{name}.log", self.env)
        self.running.append(process)
        return process

    def start_deepspec(self) -> Process:
        """A fresh process of deepspec's worker."""
        return self.start("deepspec", [str(self.worker), str(self.model)])

    def start_peer(self, name: str) -> Process:
        """A fresh process of a worker in Python."""
        return self.start(name, [str(self.python), str(HERE / f"{name}_worker.py"), str(self.threads)])

    @cached_property
    def worker(self) -> Path:
        """deepspec's worker."""
        return environment.worker()

    @cached_property
    def deepspec(self) -> Process:
        """The process that all items but training share."""
        return self.start_deepspec()

    @cached_property
    def llama(self) -> Process:
        """llama.cpp's process."""
        return self.start_peer("llama")

    @cached_property
    def torch(self) -> Process:
        """PyTorch's process, with the target loaded."""
        process = self.start_peer("torch")
        process.ask("load", file=str(self.model))
        return process

    @cached_property
    def files(self) -> dict[str, str]:
        """llama.cpp's files by format."""
        files = {"Q4_1": str(self.model)}
        for name in FORMATS[1:]:
            target = environment.WORK / f"{self.model.stem}.{name}.gguf"
            if not target.exists():
                partial = target.with_suffix(".partial")
                self.llama.ask("quantize", source=str(self.model), target=str(partial), format=name)
                partial.rename(target)
            files[name] = str(target)
        return files

    @cached_property
    def deepspec_sides(self) -> list[Side]:
        """deepspec in every precision that it has."""
        names = self.deepspec.ask("info")["precisions"]
        return [Side(f"deepspec {name}", self.deepspec, {"precision": name}) for name in names]

    @cached_property
    def llama_sides(self) -> list[Side]:
        """llama.cpp in every format, with flash attention and without."""
        return [
            Side(f"llama.cpp {name}" + (" flash" if flash else ""), self.llama, {"file": file, "flash": flash})
            for name, file in self.files.items()
            for flash in (False, True)
        ]

    @cached_property
    def torch_side(self) -> Side:
        """PyTorch."""
        return Side("torch f32", self.torch)

    @cached_property
    def text(self) -> list[int]:
        """Tokens of the first built-in training prompts one after the other."""
        turns = [json.loads(line)["conversations"][0]["content"] for line in PROMPTS.read_text().splitlines()[:160]]
        return self.deepspec.ask("tokenize", text="\n".join(turns))["tokens"]

    def tokens(self, count: int, first: int = 0) -> list[int]:
        """`count` tokens of real text."""
        if first + count > len(self.text):
            raise SystemExit(f"the text has {len(self.text)} tokens, not {first + count}")
        return self.text[first : first + count]

    def versions(self) -> dict:
        """Versions, and which instructions each engine uses."""
        found = {"deepspec_commit": environment.commit()}
        for process in {process.name: process for process in self.running}.values():
            info = process.ask("info")
            uses = info.get("features") or info["kernels"]
            found[process.name] = {"version": info["version"], "uses": uses, "threads": self.threads}
        return found

    def check(self) -> dict:
        """Compares greedy continuations: PyTorch's must be deepspec's in f32, quantised formats may drift."""
        agreed: dict[str, int] = {}
        for text in CHECK_TEXTS:
            tokens = self.deepspec.ask("tokenize", text=text)["tokens"]
            request = {"tokens": tokens, "count": CHECK_TOKENS}
            expected = self.deepspec.ask("continue", precision="f32", **request)["tokens"]
            answers = {side.name: side.ask("continue", **request) for side in self.deepspec_sides}
            answers |= {side.name: side.ask("answer", **request) for side in [*self.llama_sides, self.torch_side]}
            for name, answer in answers.items():
                agreed[name] = agreed.get(name, 0) + common_prefix(expected, answer["tokens"])
        total = CHECK_TOKENS * len(CHECK_TEXTS)
        for name, count in agreed.items():
            if count < (total if name == "torch f32" else len(CHECK_TEXTS)):
                raise SystemExit(f"{name} agrees with deepspec f32 in {count} of {total} tokens: not the same model")
        return {"greedy_tokens_equal_to_deepspec_f32": agreed, "of": total}


def common_prefix(a: list[int], b: list[int]) -> int:
    """Number of equal tokens at the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
