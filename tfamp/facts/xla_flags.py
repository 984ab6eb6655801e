"""XLA's flags with which a step compiles in fewer minutes on a GPU, and their state.

The owner of XLA_FLAGS. By default XLA tries some 40 programs of Triton for each matrix
product, each assembled by a process of ptxas: 848 for one layer of BERT-Base, 14 with
the flags, which leave products to cuBLAS. XLA reads the variable when it first compiles
something in a process, and ends the process at a flag that it does not know.

From TensorFlow 2.20 on XLA can be asked to read it now. Then the flags are in the
variable for that moment alone: JAX, which `import tensorflow` imports where it is
installed, has an XLA of its own, which may not know them.
"""

import os
import re
import sys
from typing import NamedTuple

import tensorflow as tf

from tfamp.facts import graph_context, hardware, names, switches

NAME = "XLA_FLAGS"
_AUTOTUNER = "--xla_gpu_experimental_enable_fusion_autotuner=false"
_TRITON = "--xla_gpu_enable_triton_gemm=false"
# Release of TensorFlow: those that it knows, as a process of each has shown.
KNOWN = {
    "2.19": (_TRITON,),
    "2.20": (_TRITON,),
    "2.21": (_AUTOTUNER, _TRITON),
}


class _Put(NamedTuple):
    """What `install` did: the variable before and after, and the flags added."""

    before: str | None
    after: str
    flags: tuple[str, ...]
    read: bool  # By XLA, at once; the variable is as before.
    in_time: bool  # Nothing can have been compiled: TensorFlow had not started.


_put: _Put | None = None


def choose() -> tuple[tuple[str, ...], str]:
    """Returns the flags that a process on a GPU is to have besides the user's.

    Returns:
      The flags, and why there are none, if there are none.
    """
    users = os.environ.get(NAME, "")
    release = ".".join(tf.__version__.split(".")[:2])
    if "jax" in sys.modules and not _reader():
        return (), f"jax is imported, whose XLA also reads {NAME}"
    if release not in KNOWN:
        return (), f"which flags TensorFlow {release} knows was not tried"
    if users.strip() and not users.lstrip().startswith("-"):
        return (), f"{NAME} names a file"
    named = re.findall(r"--?(\w+)", users)
    left = tuple(x for x in KNOWN[release] if x[2:].partition("=")[0] not in named)
    return left, "" if left else f"{NAME} has them"


def install() -> None:
    """Gives XLA the flags where there is an NVIDIA GPU; idempotent."""
    global _put
    flags = choose()[0]
    if _put is not None or not flags or not _has_gpu():
        return
    before = os.environ.get(NAME)
    after = " ".join([before or "", *flags]).strip()
    if read := bool(_reader()):
        _read(after)
    else:
        switches.set_environ({NAME: after})
    _put = _Put(before, after, flags, read, not graph_context.has_started())


def remove() -> None:
    """Takes back what `install` did, and no more; idempotent."""
    global _put
    if _put is not None and _put.read:
        # All are off, and on by default.
        _read(" ".join(flag.replace("=false", "=true") for flag in _put.flags))
    else:
        switches.set_environ(users())
    _put = None


def _reader():
    return names.symbol(*names.SYMBOLS)


def _read(text):
    """Has XLA read flags now, again if it has read some; others stay as they are."""
    with switches.environ({NAME: text}):
        _reader()(True)


def users() -> dict[str, str | None]:
    """Returns the variable as the user has it: {name: text, or None if it is not set}.

    It is what a process of another TensorFlow may be given.
    """
    now = os.environ.get(NAME)
    if _put is None or _put.read or now is None:
        return {NAME: now}
    if now == _put.after:
        return {NAME: _put.before}
    flags = "|".join(map(re.escape, _put.flags))  # The user has changed it since.
    left = re.sub(rf"(^|\s+)({flags})(?=\s|$)", "", now)
    return {NAME: now if left == now else left.strip() or None}


def describe() -> str:
    """Returns which flags were added, and whether they are in force; else why none."""
    if _put is None:
        return f"none ({choose()[1] if _has_gpu() else 'no NVIDIA GPU'})"
    state, now = "in force", os.environ.get(NAME, "").split()
    if _put.read and os.environ.get(NAME) != _put.before:
        state += f"; what {NAME} says since enable() is not read"
    if not _put.read and not all(flag in now for flag in _put.flags):
        state = f"no longer in {NAME}"
    elif not (_put.read or _put.in_time):
        state += " unless XLA compiled something before enable()"
    return f"{' '.join(_put.flags)} ({state})"


def _has_gpu():
    return any(device.compute_capability for device in hardware.read_devices())
