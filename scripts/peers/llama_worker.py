"""llama.cpp's side: answers one JSON request a line with one line of JSON."""

import ctypes
import sys
import time

import llama_cpp as llama
import numpy

from protocol import serve

N_CTX = 1024
FILE_TYPES = {"Q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0, "F16": llama.LLAMA_FTYPE_MOSTLY_F16}
FLASH = {True: llama.LLAMA_FLASH_ATTN_TYPE_ENABLED, False: llama.LLAMA_FLASH_ATTN_TYPE_DISABLED}
WARNING, ERROR = 3, 4


class Session:
    """A model file with a context for one sequence."""

    def __init__(self, path: str, flash: bool, threads: int):
        model_params = llama.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self.model = llama.llama_model_load_from_file(path.encode(), model_params)
        if not self.model:
            raise RuntimeError("llama.cpp cannot load the model")
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = N_CTX
        params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = FLASH[flash]
        params.no_perf = True
        self.ctx = llama.llama_init_from_model(self.model, params)
        if not self.ctx:
            raise RuntimeError("llama.cpp cannot make a context")
        self.memory = llama.llama_get_memory(self.ctx)
        self.vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.batch = llama.llama_batch_init(N_CTX, 0, 1)

    def truncate(self, length: int) -> None:
        """Keeps the first `length` positions."""
        llama.llama_memory_seq_rm(self.memory, 0, length, -1)

    def decode(self, tokens: list[int], start: int, all_logits: bool) -> float:
        """Runs tokens from position `start` on; returns the seconds it took once the batch was filled."""
        self.batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            self.batch.token[i] = token
            self.batch.pos[i] = start + i
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = 0
            self.batch.logits[i] = all_logits or i + 1 == len(tokens)
        begun = time.perf_counter()
        code = llama.llama_decode(self.ctx, self.batch)
        llama.llama_synchronize(self.ctx)
        seconds = time.perf_counter() - begun
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        return seconds

    def best(self) -> int:
        """The likeliest token after the last row; the first one of equals."""
        logits = ctypes.cast(llama.llama_get_logits_ith(self.ctx, -1), ctypes.POINTER(ctypes.c_float))
        return int(numpy.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())


class Worker:
    """Handlers by the names of requests."""

    def __init__(self, threads: int):
        self.threads = threads
        self.sessions: dict[tuple[str, bool], Session] = {}

    def session(self, request: dict) -> Session:
        """The session of a file and a way of attention, loaded at its first use."""
        key = (request["file"], request["flash"])
        if key not in self.sessions:
            self.sessions[key] = Session(*key, self.threads)
        return self.sessions[key]

    def info(self, _request: dict) -> dict:
        """Version and what the build uses of the processor."""
        return {"version": llama.__version__, "features": llama.llama_print_system_info().decode().strip(" |")}

    def quantize(self, request: dict) -> dict:
        """Writes the model again in another format."""
        params = llama.llama_model_quantize_default_params()
        params.ftype = FILE_TYPES[request["format"]]
        params.nthread = self.threads
        params.allow_requantize = True
        source, target = request["source"].encode(), request["target"].encode()
        code = llama.llama_model_quantize(source, target, ctypes.byref(params))
        if code != 0:
            raise RuntimeError(f"llama_model_quantize returned {code}")
        return {}

    def rows(self, request: dict) -> dict:
        """Steps of some rows after a context, logits for all of them; the first step warms up."""
        session = self.session(request)
        start = len(request["context"])
        session.truncate(0)
        session.decode(request["context"], 0, False)
        seconds = []
        for _ in range(1 + request["repeats"]):
            session.truncate(start)
            seconds.append(session.decode(request["rows"], start, True))
        return {"seconds": seconds[1:]}

    def prefill(self, request: dict) -> dict:
        """Prompts, logits for the last token; the first one warms up."""
        session = self.session(request)
        seconds = []
        for _ in range(1 + request["repeats"]):
            session.truncate(0)
            seconds.append(session.decode(request["tokens"], 0, False))
        return {"seconds": seconds[1:]}

    def answer(self, request: dict) -> dict:
        """A greedy answer of at most `count` tokens, a stop token included, and the seconds that it took."""
        session = self.session(request)
        stops = set(request.get("stop_ids", []))
        session.truncate(0)
        begun = time.perf_counter()
        new, start, tokens = request["tokens"], 0, []
        while len(tokens) < request["count"] and not stops.intersection(tokens[-1:]):
            session.decode(new, start, False)
            start += len(new)
            new = [session.best()]
            tokens += new
        return {"tokens": tokens, "seconds": time.perf_counter() - begun}


@llama.llama_log_callback
def log(level: int, text: bytes, _data) -> None:
    """Keeps warnings and errors, drops the rest."""
    if level in (WARNING, ERROR):
        sys.stderr.write(text.decode(errors="replace"))


if __name__ == "__main__":
    llama.llama_log_set(log, ctypes.c_void_p(0))
    llama.llama_backend_init()
    serve(Worker(int(sys.argv[1])))
