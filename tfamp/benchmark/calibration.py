"""Measures what this machine gives at most: FLOP/s by format, bytes a second.

Each product takes the result of the one before, so that none can be left out or
computed beforehand; the matrix keeps their size:

    x <- x @ w    w[i, j] ~ +-1 / sqrt(n), so that the elements of x stay near 1
"""

import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfamp import errors, hardware
from tfamp.benchmark import records
from tfamp.precision import policy
from tfamp.training import memory_limit

# Sizes of square matrices, from small on, and products in one call. Of a GPU they are
# more: a call takes 0.1 ms, a product of 4096 can take 0.2 ms.
_SIZES = {"CPU": (256, 512, 1024, 2048, 4096), "GPU": (1024, 4096, 8192)}
_PRODUCTS = {"CPU": 4, "GPU": 16}
_ARRAY_BYTES = 512 * memory_limit.MIB  # No cache holds that.
_MEMORY_SHARE = 8  # Of what a host has available, an array takes one part in eight.
_GPU_PASSES = 16
_QUERY = "clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw"


def measure(seconds: float = 1.0) -> records.Calibration:
    """Measures this process' device; for a process that does nothing else.

    Args:
      seconds: About how long each format, and the bandwidth, may take. A larger matrix
        is not begun where two runs of it would not fit.

    Returns:
      A `records.Calibration`; formats that this device does not have are missing.
    """
    devices = hardware.read_devices()
    kind = "GPU" if any(device.kind == "GPU" for device in devices) else "CPU"
    peaks, sizes = {}, {}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        clock = pool.submit(_clock_after, seconds / 2)
        for name in ("float32", "tf32", "bfloat16", "float16"):
            if hardware.format_support(name, devices).supported:
                peaks[name], size = peak(name, seconds, _SIZES[kind], _PRODUCTS[kind])
                sizes[name] = (size, size, size)
    size = array_bytes()
    return records.Calibration(
        peaks=peaks,
        sizes=sizes,
        bandwidth=bandwidth(seconds, size),
        bandwidth_bytes=3 * size,
        clock_mhz=clock.result(),
        device=hardware.device_label(devices),
    )


def _clock_after(seconds):
    """The clock while products run."""
    time.sleep(seconds)
    return clocks()[0]


# ---- Matrix products ----


def peak(
    name: str, seconds: float, sizes: tuple[int, ...], products: int
) -> tuple[float, int]:
    """Returns the best FLOP/s of square matrix products, and the size that gave them.

    The result of a product has the dtype of its operands, as in a training step; in 16
    bits the device's library adds up in float32.

    Args:
      name: "float32" (without TF32), "tf32", "bfloat16" or "float16".
      seconds: The time for all sizes together.
      sizes: Rows of the matrices, smallest first. The first is always measured; one
        that would take longer than the rest of the time is not.
      products: How many of them one call computes, one after the other.
    """
    mode = name if name in ("float32", "tf32") else f"mixed_{name}"
    dtype = "float32" if name == "tf32" else name
    best, best_size, left = 0.0, 0, seconds
    with policy.policy_scope(mode):
        for number, size in enumerate(sizes):
            work = 2.0 * size**3 * products
            if best and 2 * work / best > left:  # The first run, and one that counts.
                break
            multiply, start = _multiplier(size, dtype, products), time.perf_counter()
            reached = work / _best_seconds(multiply, left / (len(sizes) - number))
            left -= time.perf_counter() - start
            if reached > best:
                best, best_size = reached, size
    return best, best_size


def _multiplier(size, dtype, products) -> Callable[[], float]:
    """Returns a function that multiplies and waits for the result."""
    x, drawn = (tf.random.stateless_normal([size, size], (0, i)) for i in range(2))
    x, w = tf.cast(x, dtype), tf.cast(tf.sign(drawn) / size**0.5, dtype)

    @tf.function(autograph=False)
    def multiply(x, w):
        for _ in range(products):
            x = tf.linalg.matmul(x, w)
        return x[0, 0]

    return lambda: float(multiply(x, w))


def _best_seconds(run, seconds) -> float:
    """Returns the shortest of some runs; the first, which traces, does not count."""
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


# ---- Memory ----


def array_bytes() -> int:
    """Returns the size of an array: 512 MiB, or what the host has to spare."""
    try:
        free = memory_limit.available() // _MEMORY_SHARE
    except errors.RunError:  # No Linux: nobody tells.
        free = _ARRAY_BYTES
    return min(_ARRAY_BYTES, free) // 4 * 4


def bandwidth(seconds: float, size: int) -> float:
    """Returns bytes a second of this process' device, read and written together.

    The sum of STREAM in place, a = a - c: two arrays are read and one is written, and 3
    are counted, as STREAM does for its sum and triad. There a third array is written,
    which a CPU reads before, and that traffic is not counted; here there is none.

    On a CPU by numpy, a part of the arrays on every core: TensorFlow's own kernels
    reached half of that where this was written, and a limit should not be set too low.
    On a GPU by TensorFlow's update of gradient descent, which is one kernel.

    Args:
      seconds: How long it may take.
      size: Bytes of an array; a multiple of 4, several times the caches.

    References:
      McCalpin, "STREAM: Sustainable Memory Bandwidth in High Performance Computers",
      https://www.cs.virginia.edu/stream/
    """
    on_gpu = bool(tf.config.get_visible_devices("GPU"))
    measured = _gpu_bandwidth if on_gpu else _cpu_bandwidth
    return measured(seconds, size)


def cores() -> int:
    """Returns how many CPU cores this process may use."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return len(allowed) or os.cpu_count() or 1


def _cpu_bandwidth(seconds, size):
    count = cores()
    a, c = np.empty(size // 4, "float32"), np.empty(size // 4, "float32")
    parts = list(zip(np.array_split(a, count), np.array_split(c, count), strict=True))
    with concurrent.futures.ThreadPoolExecutor(count) as pool:

        def run_all(function):
            list(pool.map(function, parts))

        # The core that writes first decides in which memory a part lies.
        run_all(lambda part: (part[0].fill(1.0), part[1].fill(1e-3)))
        best = _best_seconds(
            lambda: run_all(lambda part: np.subtract(*part, out=part[0])), seconds
        )
    return 3 * size / best


def _gpu_bandwidth(seconds, size):
    a = tf.Variable(tf.ones([size // 4]))
    c = tf.fill([size // 4], 1e-3)

    @tf.function(autograph=False)
    def subtract(c):
        for _ in range(_GPU_PASSES):
            tf.raw_ops.ResourceApplyGradientDescent(var=a.handle, alpha=1.0, delta=c)
        return a.sparse_read(0)  # After the last pass; `a[0]` would copy the array.

    best = _best_seconds(lambda: float(subtract(c)), seconds)
    return _GPU_PASSES * 3 * size / best


# ---- Clocks ----


def clocks(root: pathlib.Path = pathlib.Path("/")) -> tuple[float | None, str]:
    """Returns the clock of this process' device in MHz, and a line on it.

    Of the first GPU by `nvidia-smi`, where this process sees one; else the mean over
    the cores of the CPU, which in a virtual machine is often the nominal clock.

    Args:
      root: Root of the file system.

    Returns:
      (MHz, text); (None, "") where nothing can be read.
    """
    if tf.config.get_visible_devices("GPU"):
        return parse_nvidia_smi(_nvidia_smi())
    folders = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*"))
    found = [_read(folder / "cpufreq/scaling_cur_freq") for folder in folders]
    frequencies = [int(text) / 1000 for text in found if text.strip().isdigit()]
    return describe_cores(frequencies or parse_cpuinfo(_read(root / "proc/cpuinfo")))


def _read(path):
    try:
        return path.read_text()
    except OSError:
        return ""


def _nvidia_smi() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    # The first that this process sees, in the order of nvidia-smi.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    command = [program, f"--id={visible}", f"--query-gpu={_QUERY}"]
    try:
        run = subprocess.run(
            [*command, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout if run.returncode == 0 else ""


def parse_nvidia_smi(text: str) -> tuple[float | None, str]:
    """Reads a line of `nvidia-smi`: clocks, temperature, power.

    Args:
      text: "1980, 2619, 1980, 45, 312.50"; a field may be "[N/A]".

    Returns:
      (MHz of the multiprocessors, text); (None, "") where it is no such line.
    """
    fields = [field.strip() for field in (text.splitlines() or [""])[0].split(",")]
    names = ("clock {} MHz", "memory {} MHz", "at most {} MHz", "{} C", "{} W")
    if len(fields) != len(names):
        return None, ""
    known = [_is_number(field) for field in fields]
    parts = [
        name.format(field)
        for name, field, is_known in zip(names, fields, known, strict=True)
        if is_known
    ]
    text = f"GPU: {', '.join(parts)}" if parts else ""
    return (float(fields[0]) if known[0] else None), text


def _is_number(text):
    return re.fullmatch(r"\d+(\.\d+)?", text) is not None


def parse_cpuinfo(text: str) -> list[float]:
    """Returns the MHz of each core from the text of /proc/cpuinfo."""
    return [float(x) for x in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", text, re.M)]


def describe_cores(frequencies: list[float]) -> tuple[float | None, str]:
    """Returns the mean of the cores' MHz, and a line; (None, "") without cores."""
    if not frequencies:
        return None, ""
    mean = sum(frequencies) / len(frequencies)
    low, high = min(frequencies), max(frequencies)
    cores = f"{len(frequencies)} core{'s' if len(frequencies) > 1 else ''}"
    return mean, f"CPU: {mean:.0f} MHz, {low:.0f} to {high:.0f} over {cores}"
