"""Builds the GPU that computes nothing, and runs Python with it.

    python tests/gpu/stand_in.py my_script.py --some=flag

TensorFlow then finds an H100. What it places, launches, copies and compiles is real;
kernels do nothing, so that every value is what was in memory. Needs g++ and the extra
`stand_in`, whose ptxas and libdevice XLA compiles with.
"""

import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any

import filelock

HERE = pathlib.Path(__file__).resolve().parent
FOLDERS = HERE.parents[1] / "build/stand_in"
LIBRARIES = """libcuda.so.1 libcudart.so.12 libcublas.so.12 libcublasLt.so.12
    libcudnn.so.9 libcufft.so.11 libcusolver.so.11 libcusparse.so.12 libnccl.so.2
    libcupti.so.12 libcurand.so.10 libnvidia-ml.so.1""".split()
# Of TensorFlow's own stubs, which load what they call from NVIDIA's libraries.
NVIDIA = "__cuda|cu[A-Z]|cublas|cuda[A-Z]|cudnn|cufft|cusolver|cusparse|cupti|nccl|nvml"
# Calls of a library that give the GPU work to do.
WORK = (
    r"cublas\w*([gG]emm|gemv|geam|trsm)\w*|cublasLtMatmul|cudnnBackendExecute|cudnnCTCLoss|"
    r"cudnn(?!Get|Find)\w*(For|Back)ward\w*|cufftExec\w*|cusparseSpM[MV]"
)
CALL = "long {0}(void) {{ return 0; }}\n"
WORK_CALL = 'long {0}(void) {{ stand_in_library("{0}"); return 0; }}\n'
# XLA's default compiles each product some 40 times.
FAST_XLA = "--xla_gpu_enable_triton_gemm=false"
# XLA starts it for each module, as a process; `--version` alone is no module.
PTXAS = """#!/bin/sh
[ $# -lt 2 ] || [ -z "$STAND_IN_PTXAS" ] || echo >>"$STAND_IN_PTXAS"
exec "{}" "$@"
"""


def missing() -> str | None:
    """Returns why it cannot be built here, or None."""
    if not sys.platform.startswith("linux"):
        return "the stand-in for a GPU is for Linux"
    for tool in ("g++", "nm"):
        if not shutil.which(tool):
            return f"the stand-in for a GPU needs {tool}"
    if not _nvcc():
        return 'the stand-in for a GPU needs pip install "tfamp[stand-in]"'
    if not (_tensorflow() / "include/third_party/gpus/cuda/include/cuda.h").exists():
        return "this TensorFlow has no headers of CUDA"
    return None


@functools.cache
def build() -> pathlib.Path:
    """Returns the folder of the libraries, which it builds if they are not there.

    In build/ of the checkout, one for each TensorFlow, compiler and state of the
    sources; several processes may ask at once.
    """
    sources = b"".join((HERE / name).read_bytes() for name in _SOURCES)
    stamp = f"{_tensorflow()} {_framework().stat().st_mtime} {_nvcc()}"
    key = hashlib.sha256(sources + stamp.encode()).hexdigest()[:12]
    folder = FOLDERS / key
    FOLDERS.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(FOLDERS / "lock"):
        if not folder.exists():
            unfinished = FOLDERS / "unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            _compile(unfinished)
            unfinished.rename(folder)
    return folder


def environment() -> dict[str, str]:
    """Returns the environment in which a new process finds the GPU."""
    folder, flags = build(), os.environ.get("XLA_FLAGS", "")
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder),  # Read once, when a process starts.
        "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={folder}/cuda {flags}".strip(),
        "CUDA_VISIBLE_DEVICES": "0",
        "STAND_IN": "1",
    }


def run(
    *arguments: str, flags: str = "", timeout: float = 600.0, **environ: str
) -> dict[str, Any]:
    """Runs Python with the GPU, in a process of its own.

    Args:
      *arguments: Of Python: a script and its own, or "-c" and code.
      flags: Of XLA, besides those of the environment.
      timeout: Seconds.
      **environ: Variables to set.

    Returns:
      The JSON object of its last line, if that is one, and "compiled": the functions
      that XLA has compiled.

    Raises:
      RuntimeError: If it fails or takes longer; the text has what it wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        every = {**environment(), **_TOLD, "XDG_CACHE_HOME": folder}
        every = {**every, "STAND_IN_PTXAS": f"{folder}/ptxas", **environ}
        every["XLA_FLAGS"] += f" {flags}"
        done = _ended(arguments, every, timeout)
        if done.returncode == -signal.SIGSEGV:
            # Seen once in some 25 runs of one path, and not explained; a path that
            # always ends so does it again.
            print(f"{arguments} once more after:\n{done.stderr}", file=sys.stderr)
            done = _ended(arguments, every, timeout)
    if done.returncode:
        lines = f"{done.stdout}\n{done.stderr}".splitlines()
        lines = [x for x in lines if not re.match(r"[IW]\d{4} ", x)]
        text = "\n".join([f"{arguments} ended with {done.returncode}", *lines[-40:]])
        raise RuntimeError(text)
    compiled = re.findall(rf"{_PROFILER}.*Compiled (\S+) \d+ times", done.stderr)
    last = done.stdout.splitlines()[-1]
    figures = json.loads(last) if last.startswith("{") else {}
    return {**figures, "compiled": compiled}


def reset() -> None:
    """Forgets what was counted; in a process that has the GPU."""
    _library().stand_in_reset()


def counts() -> dict[str, int]:
    """Returns how often each thing was done since `reset`.

    "kernel NAME", "library NAME", "graph" (launches), "node of a graph" (of all
    launched), "copy DtoH" (to the host), "copy HtoD", "copy DtoD", "memset", "wait".
    """
    lines = _library().stand_in_counts().decode().splitlines()
    return {what: int(times) for what, times in (each.split("\t") for each in lines)}


_SOURCES = "stand_in.cc", "stand_in.py"
_PROFILER = "device_compilation_profiler"  # TensorFlow's: it logs what XLA compiles.
_TOLD = {
    "TF_CPP_MIN_LOG_LEVEL": "0",
    "TF_CPP_VMODULE": f"{_PROFILER}=1",
    "PYTHONFAULTHANDLER": "1",
}


def _ended(arguments, environ, timeout):
    command, kept = [sys.executable, *arguments], {"capture_output": True, "text": True}
    try:
        return subprocess.run(command, env=environ, timeout=timeout, **kept)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{arguments} took over {timeout:g} s") from error


def _compile(folder):
    folder.mkdir()
    listed = _run("nm", "-D", "--defined-only", str(_framework()))
    wanted = set(re.findall(rf"\b((?:{NVIDIA})\w*)$", listed, re.M))
    # The headers' macros append a version to some names: what is compiled decides.
    gpus = _tensorflow() / "include/third_party/gpus"
    places = "cuda/include", "cuda/libcudacxx/include", "cudnn/include"
    headers = [f"-I{gpus / place}" for place in (*places, "cuda/nvml/include")]
    options = "-O1", "-std=c++17", "-fPIC", "-c"
    _run("g++", *options, *headers, str(HERE / "stand_in.cc"), "-o", f"{folder}/own.o")
    own = set(re.findall(r" T (\w+)$", _run("nm", f"{folder}/own.o"), re.M))
    calls = folder / "calls.c"
    calls.write_text(
        "void stand_in_library(const char *);\n"
        + "".join(
            (WORK_CALL if re.fullmatch(WORK, name) else CALL).format(name)
            for name in sorted(wanted - own)
        )
    )
    _run("gcc", "-fPIC", "-c", str(calls), "-o", f"{folder}/calls.o")
    objects = f"{folder}/own.o", f"{folder}/calls.o"
    _run("g++", "-shared", *objects, "-o", f"{folder}/{LIBRARIES[0]}")
    for name in LIBRARIES[1:]:
        (folder / name).symlink_to(LIBRARIES[0])
    (folder / "cuda/bin").mkdir(parents=True)
    (folder / "cuda/nvvm").symlink_to(_nvcc() / "nvvm")
    ptxas = folder / "cuda/bin/ptxas"
    ptxas.write_text(PTXAS.format(_nvcc() / "bin/ptxas"))
    ptxas.chmod(0o755)


def _run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def _tensorflow():
    return pathlib.Path(importlib.util.find_spec("tensorflow").origin).parent


def _framework():
    return _tensorflow() / "libtensorflow_framework.so.2"


def _nvcc():
    """Returns the folder of nvidia-cuda-nvcc-cu12, or None."""
    with_files = importlib.util.find_spec("nvidia")
    for place in with_files.submodule_search_locations if with_files else ():
        if (found := pathlib.Path(place, "cuda_nvcc")) and (
            found / "bin/ptxas"
        ).exists():
            return found
    return None


@functools.cache
def _library():
    library = ctypes.CDLL(LIBRARIES[0])
    library.stand_in_counts.restype = ctypes.c_char_p
    return library


if __name__ == "__main__":
    if why := missing():
        sys.exit(why)
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment())
