"""PyTorch's side: answers one JSON request a line with one line of JSON."""

import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from protocol import serve
from torch_drafter import Training
from torch_llama import Llama


class Worker:
    """Handlers by the names of requests."""

    def __init__(self, threads: int):
        torch.set_num_threads(threads)
        self.model: Llama | None = None
        self.training: Training | None = None

    def info(self, _request: dict) -> dict:
        """Version, instruction set, and the memory that the process has before any work."""
        features = torch.backends.cpu.get_cpu_capability()
        return {"version": torch.__version__, "features": features, "start_bytes": resident("VmRSS")}

    def load(self, request: dict) -> dict:
        """Loads the target."""
        self.model = Llama(request["file"])
        return {}

    @torch.inference_mode()
    def prefill(self, request: dict) -> dict:
        """Prompts, logits for the last token; the first one warms up."""
        tokens = torch.tensor([request["tokens"]])
        seconds = []
        for _ in range(1 + request["repeats"]):
            begun = time.perf_counter()
            F.linear(self.model(tokens)[:, -1], self.model.head)
            seconds.append(time.perf_counter() - begun)
        return {"seconds": seconds[1:]}

    @torch.inference_mode()
    def answer(self, request: dict) -> dict:
        """The likeliest continuation, computed from the start for every token: for checks, not for times."""
        tokens, count = request["tokens"], request["count"]
        for _ in range(count):
            hidden = self.model(torch.tensor([tokens]))[:, -1]
            tokens = [*tokens, int(F.linear(hidden, self.model.head).argmax())]
        return {"tokens": tokens[-count:]}

    @torch.inference_mode()
    def prepare(self, request: dict) -> dict:
        """Passes over all sequences, `batch` at a time, that keep the outputs of layers and the final rows."""
        kept: dict[int | str, torch.Tensor] = {}

        def keeper(layer: int):
            return lambda _module, _inputs, output: kept.update({layer: output})

        hooks = [self.model.layers[layer].register_forward_hook(keeper(layer)) for layer in request["layers"]]
        batches = torch.tensor(request["sequences"]).split(request["batch"])
        seconds = []
        for _ in range(1 + request["repeats"]):
            begun = time.perf_counter()
            for batch in batches:
                kept["final"] = self.model(batch)
                kept["features"] = torch.cat([kept[layer] for layer in request["layers"]], dim=-1)
            seconds.append(time.perf_counter() - begun)
        for hook in hooks:
            hook.remove()
        return {"seconds": seconds[1:]}

    def train(self, request: dict) -> dict:
        """Steps of training a drafter on the weights and inputs in a file."""
        if self.training is None:
            self.training = Training(request["file"], request["config"])
        seconds, losses, norms = [], [], []
        for _ in range(request["repeats"]):
            begun = time.perf_counter()
            loss, norm = self.training.step()
            seconds.append(time.perf_counter() - begun)
            losses.append(loss)
            norms.append(norm)
        return {"seconds": seconds, "losses": losses, "grad_norms": norms, "peak_bytes": resident("VmHWM")}


def resident(field: str) -> int:
    """Bytes of resident memory of this process: `VmRSS` now, `VmHWM` at most."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    serve(Worker(int(sys.argv[1])))
