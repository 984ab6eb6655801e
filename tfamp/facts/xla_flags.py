"""XLA's flags with which a step compiles in a minute on a GPU, and their state.

The owner of XLA_FLAGS. By default XLA tries some 40 programs of Triton for each matrix
product, each assembled by a process of ptxas: 848 for one layer of BERT-Base, 14 with
the flags, which leave products to cuBLAS. XLA reads the variable when it first compiles
something in a process, and ends the process at a flag that it does not know.
"""

import os
import re
import sys
from typing import NamedTuple

import tensorflow as tf

from tfamp.facts import graph_context, hardware, switches

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
    in_time: bool  # Nothing can have been compiled: TensorFlow had not started.


_put: _Put | None = None


def choose() -> tuple[tuple[str, ...], str]:
    """Returns the flags that a process on a GPU is to have besides the user's.

    Returns:
      The flags, and why there are none, if there are none.
    """
    users = os.environ.get(NAME, "")
    release = ".".join(tf.__version__.split(".")[:2])
    if "jax" in sys.modules:
        return (), f"jax is imported, whose XLA also reads {NAME}"
    if release not in KNOWN:
        return (), f"which flags TensorFlow {release} knows was not tried"
    if users.strip() and not users.lstrip().startswith("-"):
        return (), f"{NAME} names a file"
    named = re.findall(r"--?(\w+)", users)
    left = tuple(x for x in KNOWN[release] if x[2:].partition("=")[0] not in named)
    return left, "" if left else f"{NAME} has them"


def install() -> None:
    """Puts the flags into the environment where there is an NVIDIA GPU; idempotent."""
    global _put
    flags = choose()[0]
    if _put is not None or not flags or not _has_gpu():
        return
    before = os.environ.get(NAME)
    after = " ".join([before or "", *flags]).strip()
    switches.set_environ({NAME: after})
    _put = _Put(before, after, flags, not graph_context.has_started())


def remove() -> None:
    """Takes out of the environment what `install` put in, and no more; idempotent."""
    global _put
    switches.set_environ(users())
    _put = None


def users() -> dict[str, str | None]:
    """Returns the variable as the user has it: {name: text, or None if it is not set}.

    It is what a process of another TensorFlow may be given.
    """
    now = os.environ.get(NAME)
    if _put is None or now is None:
        return {NAME: now}
    if now == _put.after:
        return {NAME: _put.before}
    left = now
    for flag in _put.flags:  # The user has changed it since.
        left = re.sub(rf"(^|\s+){re.escape(flag)}(?=\s|$)", "", left)
    return {NAME: now if left == now else left.strip() or None}


def describe() -> str:
    """Returns which flags were added, and whether they are in force; else why none."""
    if _put is None:
        return f"none ({choose()[1] if _has_gpu() else 'no NVIDIA GPU'})"
    state = "in force"
    if not all(flag in os.environ.get(NAME, "").split() for flag in _put.flags):
        state = f"no longer in {NAME}"
    elif not _put.in_time:
        state += " unless XLA compiled something before enable()"
    return f"{' '.join(_put.flags)} ({state})"


def _has_gpu():
    return any(device.compute_capability for device in hardware.read_devices())
