"""Switches of TensorFlow's kernels that can be set: requested, effective, and why.

The owner of op determinism and of the environment variables below; TF32 belongs to
`precision.policy`. What reads a variable was found in TensorFlow 2.21's binaries.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import tensorflow as tf

from tfamp.facts import graph_context, hardware, names, user_code

DETERMINISM = "op determinism"
AUTOTUNE = "TF_CUDNN_USE_AUTOTUNE"  # Read whenever a convolution's kernel is created.
# Variable: the device whose kernels read it, and its default. All but the first are
# read once in a process; the defaults are those that sum in float32.
VARIABLES = {
    AUTOTUNE: ("GPU", "1"),
    "TF_FP16_CONV_USE_FP32_COMPUTE": ("GPU", "1"),
    "TF_FP16_MATMUL_USE_FP32_COMPUTE": ("GPU", "1"),
    "TF_FP16_RNN_USE_FP32_COMPUTE": ("GPU", "1"),
    "TF_CONV2D_USE_FP16_ACCUMULATE": ("CPU", "0"),
}
# Whether TensorFlow takes a GPU's memory as it needs it, or all of it at once.
GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
_DESCRIBED = {**VARIABLES, GROWTH: ("GPU", "false")}
_IN_TIME = "if set before it was read"


class Switch(NamedTuple):
    """One switch.

    Attributes:
      name: The environment variable, or "op determinism".
      requested: The variable's text, or its default; of determinism "1" or "0".
      effective: The same where it holds; else "no effect", or what is not sure.
      reason: Why the two differ, if they do.
    """

    name: str
    requested: str
    effective: str
    reason: str


def describe() -> list[Switch]:
    """Returns every switch as it stands here, without starting TensorFlow's runtime."""
    state = str(int(graph_context.deterministic()))
    return [Switch(DETERMINISM, state, state, ""), *map(_describe, _DESCRIBED)]


def _describe(name):
    needs, default = _DESCRIBED[name]
    requested = effective = os.environ.get(name, default)
    reason = ""
    devices = hardware.read_devices()
    if needs == "GPU" and not any(each.compute_capability for each in devices):
        effective, reason = "no effect", "there is no NVIDIA GPU"
    elif name == AUTOTUNE and graph_context.deterministic():
        effective, reason = "0", "op determinism makes cuDNN use its first algorithm"
    elif name != AUTOTUNE and name in os.environ and graph_context.has_started():
        effective = f"{requested} {_IN_TIME}"
        reason = "TensorFlow has started and may have read it already"
    return Switch(name, requested, effective, reason)


@contextlib.contextmanager
def scope(
    *,
    deterministic: bool | None = None,
    cudnn_autotune: bool | None = None,
    float16_accumulation: Literal["float32", "float16"] | None = None,
) -> Iterator[None]:
    """Sets switches; afterwards all is as before, also after an error.

    One that may come too late is set all the same, with a warning.

    Args:
      deterministic: Whether ops give the same numbers in every run (and TensorFlow's
        random operations raise unless `keras.utils.set_random_seed` was called
        before). None leaves it; so for the others.
      cudnn_autotune: Whether cuDNN's algorithms are measured, the fastest taken.
      float16_accumulation: What float16 convolutions, matrix products, LSTM and GRU
        sum in: "float32", TensorFlow's default, or "float16", of twice the peak on a
        GeForce RTX 4090 (NVIDIA, "Ada GPU Architecture", 2022, appendix A), and wrong
        for long sums (4096 ones and more).
    """
    variables = {}
    if cudnn_autotune is not None:
        variables[AUTOTUNE] = str(int(cudnn_autotune))
    if float16_accumulation is not None:
        flipped = float16_accumulation == "float16"
        variables |= {
            name: str(int(default) ^ flipped)
            for name, (_, default) in VARIABLES.items()
            if name != AUTOTUNE
        }
    changed = [
        name for name in variables if variables[name] != _describe(name).requested
    ]
    before = graph_context.deterministic()
    with environ(variables), contextlib.ExitStack() as undo:
        undo.callback(_set_determinism, before)
        _set_determinism(before if deterministic is None else deterministic)
        late = [each for each in map(_describe, changed) if _IN_TIME in each.effective]
        if late:
            names = ", ".join(f"{each.name}={each.requested}" for each in late)
            user_code.warn(f"{late[0].reason}. Received: {names}.")
        yield


@contextlib.contextmanager
def environ(values: Mapping[str, str | None]) -> Iterator[None]:
    """Scopes environment variables; None unsets one."""
    before = {name: os.environ.get(name) for name in values}
    set_environ(values)
    try:
        yield
    finally:
        set_environ(before)


def set_environ(values: Mapping[str, str | None]) -> None:
    """Sets environment variables; None unsets one."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _set_determinism(enabled):
    if enabled == graph_context.deterministic():
        return
    if enabled:
        tf.config.experimental.enable_op_determinism()
    else:
        back = "tensorflow.python.framework.config:disable_op_determinism"
        names.resolve(back, lambda: None)()  # There is no public way.
