"""Memory: what a host has left, a limit that a process keeps, and lack of it told.

A process is held to its limit by its own resident memory, as a container is by Linux.
`RLIMIT_DATA` and `RLIMIT_AS` would not do: they make allocations fail, and where one
fails TensorFlow 2.21 often crashes on a CPU with nothing said (SIGSEGV), which cannot
be told from a bug.
"""

import os
import pathlib
import re
import threading
import time

import tensorflow as tf

from tfamp import errors

MIB = 2**20
_PAUSE = 0.005  # Seconds; between two looks a step can take some tens of MiB.
# How a failed process' last words tell that memory ran out, and what of them is shown.
_SIGNS = (
    r"^killed \(SIGKILL\).*",  # Linux, or a container; see `benchmark_process`.
    r"OOM when allocating tensor.*? by allocator \w+",
    r"Out of memory while trying to allocate [\d.]+ ?\w+",  # XLA.
    # A full disk, or too many files, are errors of the same name.
    r"^ResourceExhaustedError: (?!.*(No space left|Too many open files|quota)).*",
    r"RESOURCE_EXHAUSTED.*",
    # 1 is `dnnl_out_of_memory` of oneDNN's `dnnl_status_t`.
    r"received an exception: ?Status: ?1\b[^\[]*",
    r"std::bad_alloc",
    r"^\w*MemoryError\b.*",  # Python's, numpy's, and that of `hold`.
    r"CUDA_ERROR_OUT_OF_MEMORY.*",
    r"Dst tensor is not initialized.*",  # A copy to a GPU without room for it.
    r"failed to allocate the scratch space.*",  # cuDNN's.
    r"Failed to allocate \d+ bytes.*",
    r"(CUDNN|CUBLAS)_STATUS_ALLOC_FAILED.*",
)


def available(root: pathlib.Path = pathlib.Path("/")) -> int:
    """Returns how many bytes a process may still take without harm to others.

    The least of what Linux says that the host has available, and what the control
    groups of this process (a container's, say) have left, files in memory that can be
    dropped not counted.

    Args:
      root: Root of the file system.

    Raises:
      RunError: If this is not Linux.
    """
    meminfo = root / "proc/meminfo"
    found = re.search(r"MemAvailable:\s*(\d+) kB", _read(meminfo))
    if not found:
        raise errors.RunError(
            "How much memory is available is read from Linux. Received: no "
            f"MemAvailable in {meminfo}. Expected a Linux host."
        )
    return min([int(found.group(1)) * 1024, *_left_to_groups(root)])


def _left_to_groups(root):
    """What each control group that limits this process' memory has left."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = top / path.lstrip("/")
        for folder in [group, *group.parents]:
            if folder.is_relative_to(top):
                yield from _left_to(folder, bool(controllers))


def _left_to(folder, first_version):
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    if not first_version:
        names = ("memory.max", "memory.current", "inactive_file")
    limit, used = (_read(folder / name).strip() for name in names[:2])
    if limit.isdigit() and used.isdigit():
        files = re.search(rf"^{names[2]} (\d+)", _read(folder / "memory.stat"), re.M)
        yield max(0, int(limit) - int(used) + int(files.group(1) if files else 0))


def _read(file):
    try:
        return file.read_text()
    except OSError:
        return ""


def peak_host() -> int | None:
    """Returns the peak resident memory of this process in bytes; None if not known.

    `getrusage` would not do: Linux starts it from what the parent process had.
    """
    return _own("VmHWM")


def anonymous_host() -> int | None:
    """Returns this process' resident memory that is no file's, in bytes, or None."""
    return _own("RssAnon")


def peak_anonymous_host() -> int | None:
    """Returns about the peak of `anonymous_host`: programs and libraries left out.

    Linux knows the peak of all resident memory alone; the files' part is that of now.
    """
    peak, files = _own("VmHWM"), _own("RssFile")
    return None if None in (peak, files) else peak - files


def _own(name):
    found = re.search(rf"{name}:\s*(\d+) kB", _read(pathlib.Path("/proc/self/status")))
    return int(found.group(1)) * 1024 if found else None


def peak_device() -> int | None:
    """Returns the peak memory that TensorFlow took of the first GPU, in bytes."""
    if not tf.config.list_physical_devices("GPU"):
        return None
    return tf.config.experimental.get_memory_info("GPU:0")["peak"]


def check_allocations() -> None:
    """Raises RunError if a limit makes allocations of this process fail."""
    import resource  # Not on Windows.

    limits = {"-v": resource.RLIMIT_AS, "-d": resource.RLIMIT_DATA}
    for flag, kind in limits.items():
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            raise errors.RunError(
                "TensorFlow crashes where such a limit is reached, and a crash tells "
                f"nothing. Received: `ulimit {flag} {limit // 1024}`. Expected `ulimit "
                f"{flag} unlimited` and --memory_limit_mb instead."
            )


def hold(host: int, device: int | None) -> None:
    """Holds this process to limits; before TensorFlow starts. It ends where it exceeds.

    Args:
      host: Bytes of resident memory. Above it the process writes a line to standard
        error and ends with 1.
      device: Bytes on the first GPU; None: all of it.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if device is not None and gpus:
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=device // MIB)
        tf.config.set_logical_device_configuration(gpus[0], [limit])
    threading.Thread(target=_watch, args=(host,), daemon=True).start()


def _watch(limit):
    page = os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/statm", "rb", buffering=0) as file:
        while True:
            held = int(file.read(200).split()[1]) * page
            if held > limit:
                # Not through `sys.stderr`, which another thread may have locked.
                os.write(2, f"\nMemoryError: {over(held, limit)}\n".encode())
                os._exit(1)  # At once: the next allocation is on its way.
            file.seek(0)
            time.sleep(_PAUSE)


def over(held: int, limit: int) -> str:
    """Returns what is told of a process that exceeds its limit, both in bytes."""
    return f"{mib(held)} resident, the limit is {mib(limit)}"


def lack(reason: str) -> str:
    """Returns the part of a process' reason that tells of a lack of memory.

    Args:
      reason: From `benchmark_process.run`.

    Returns:
      A short text; "" if the process failed for something else.
    """
    for sign in _SIGNS:
        found = re.search(sign, reason)
        if found:
            text = found.group().strip()
            return text if len(text) <= 200 else f"{text[:200]} ..."
    return ""


def mib(count: float) -> str:
    """Returns a number of bytes in MiB as text."""
    return f"{count / MIB:,.0f} MiB"
