"""What a process may hold of memory, and the most that this one has held."""

import pathlib
import re
import resource
import sys
from typing import NamedTuple

import tensorflow as tf

from tfamp import errors, extras
from tfamp.facts import hardware

MIB = 2**20
# Of what the host has available: the rest is for what others take meanwhile.
SHARE = 0.8
_STATUS = pathlib.Path("/proc/self/status")  # Of this process; Linux alone has it.


class Memory(NamedTuple):
    """What a process may hold.

    Attributes:
      host: Bytes of resident memory, programs included; None: no limit.
      device: Bytes of the first GPU; None: all, or there is none.
    """

    host: int | None = None
    device: int | None = None


NO_LIMIT = Memory()


def over(held: int, limit: int) -> str:
    """Returns the message for a process that exceeds its limit, both in bytes."""
    return f"{mib(held)} resident, the limit is {mib(limit)}"


def mib(count: float) -> str:
    """Returns a number of bytes in MiB as text."""
    return f"{count / MIB:,.0f} MiB"


def available() -> int:
    """Returns how many bytes a process may still take without harm to others.

    The least of what the host has available, and what the control group of this process
    (a container's, say) has left, files in memory that can be dropped not counted.
    """
    psutil = extras.require("psutil")
    return min([psutil.virtual_memory().available, *_left_to_group()])


def _left_to_group(root=pathlib.Path("/sys/fs/cgroup")) -> list[int]:
    """What a container leaves; psutil 7 knows the host alone."""
    try:
        limit, used = (
            int((root / name).read_text()) for name in ("memory.max", "memory.current")
        )
        stat = dict(map(str.split, (root / "memory.stat").read_text().splitlines()))
    except (OSError, ValueError):  # No container, or a limit of "max".
        return []
    return [max(0, limit - used + int(stat["inactive_file"]))]


def parse_size(size: str | int | None) -> int | None:
    """Returns bytes: of "2GiB", "800 MiB", "1.5GB", or of a number.

    Raises:
      ValueError: If it is none of these.
    """
    if size is None:
        return None
    units = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
    units |= {f"{name}i": 2 ** (10 * n) for n, name in enumerate("kmgt", 1)}
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([kmgt]?i?)b?", str(size).lower())
    known = match and match[2] in units
    amount = int(float(match[1]) * units[match[2]]) if match and known else 0
    if amount < MIB:
        raise ValueError(
            "`limit` must be an amount of memory, of 1 MiB or more. Received: "
            f"limit={size!r}. Expected for example '2GiB', '800MiB', or a number of "
            "bytes."
        )
    return amount


def limits(size: str | int | None) -> tuple[Memory, str]:
    """Returns what a process may hold on this host, and the limit as text.

    Args:
      size: Of a process, as of `parse_size`: of the first GPU where there is one, else
        of the host. None: all of the GPU, or `SHARE` of what the host has available.

    Raises:
      RunError: If a limit of the shell makes allocations fail.
      ValueError: If it is no size, or more than the host can spare.
    """
    limit = parse_size(size)
    _check_allocations()
    spare = available()
    share = int(SHARE * spare)
    shared = f"{SHARE:.0%} of the {mib(spare)} available at the start"
    text = f"{mib(limit)}, as requested" if limit else ""
    if any(device.kind == "GPU" for device in hardware.read_devices()):
        return Memory(share, limit), f"memory of the GPU: {text or 'all'}"
    if limit and limit > share:
        raise ValueError(
            "The limit is more than this host can spare. Received: a limit of "
            f"{mib(limit)}. Expected at most {mib(share)}, {shared}."
        )
    text = text or f"{mib(share)}, {shared}"
    return Memory(limit or share), f"memory of the CPU: {text}"


def _check_allocations():
    for flag, kind in {"-v": resource.RLIMIT_AS, "-d": resource.RLIMIT_DATA}.items():
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            raise errors.RunError(
                "TensorFlow crashes at this limit without an error message. Received: "
                f"`ulimit {flag} {limit // 1024}`. Expected `ulimit {flag} unlimited`, "
                "and tfamp's own limit instead."
            )


def peak_host() -> int:
    """Returns the peak resident memory of this process, in bytes.

    `getrusage` would not do on Linux, which starts it from what the parent process had.
    """
    text = _STATUS.read_text() if _STATUS.exists() else ""
    if match := re.search(r"VmHWM:\s*(\d+) kB", text):
        return int(match[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB but on macOS.


def peak_device(again: bool = False) -> int | None:
    """Returns the peak memory that TensorFlow took of the first GPU, in bytes.

    Args:
      again: Whether the next peak is that of what comes from here on.
    """
    if not tf.config.list_physical_devices("GPU"):
        return None
    peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    if again:
        tf.config.experimental.reset_memory_stats("GPU:0")
    return peak
