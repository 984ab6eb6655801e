"""TensorFlow's kernel switches that change numbers: requested, effective, and set.

The owner of op determinism and of the environment variables in `OWNED`. TF32 belongs
to `policy`, and all other switches are only told of: `switch_table` has the facts.
"""

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import config

from tfamp import hardware, switch_effects, switch_table

Switch = switch_effects.Switch
OWNED = (switch_table.AUTOTUNE, *switch_table.ACCUMULATION)


class Snapshot(NamedTuple):
    """What `configure` changes: the variables' texts, None where unset; determinism."""

    variables: dict[str, str | None]
    deterministic: bool


def describe() -> list[Switch]:
    """Returns every switch as it stands here, without starting TensorFlow's runtime.

    Asking TensorFlow whether ops are deterministic makes it read
    `TF_DETERMINISTIC_OPS`: a later change of that variable has no effect, which is
    told then.

    Returns:
      A list of `Switch`; variables that TensorFlow does not read only if they are set.
    """
    return switch_effects.evaluate(_read_host())


def _read_host():
    return switch_effects.Host(
        dict(os.environ),
        hardware.read_devices(),
        tf.config.experimental.tensor_float_32_execution_enabled(),
        config.is_op_determinism_enabled(),  # TensorFlow 2.21
        _has_started(),
    )


def _has_started():
    """Whether TensorFlow's runtime has started, so that kernels may have run."""
    return bool(context.context()._initialized)  # TensorFlow 2.21


def configure(
    *,
    deterministic: bool | None = None,
    cudnn_autotune: bool | None = None,
    float16_accumulation: Literal["float32", "float16"] | None = None,
) -> list[Switch]:
    """Sets switches; call it before anything runs.

    The variables are read by TensorFlow's CUDA kernels, and one by a CPU's float16
    convolution; most of them once in a process. One that may come too late is set all
    the same, with a warning.

    Args:
      deterministic: Whether ops give the same numbers in every run (and TensorFlow's
        random operations raise unless `keras.utils.set_random_seed` was called
        before). None leaves it; so for the others.
      cudnn_autotune: Whether cuDNN's algorithms are measured, the fastest taken.
      float16_accumulation: What float16 convolutions, matrix products, LSTM and GRU
        sum in: "float32", TensorFlow's default, or "float16", faster on some GPUs and
        wrong for long sums (4096 ones and more).

    Returns:
      The `Switch`es asked for, as they stand afterwards.

    Raises:
      TypeError, ValueError: If an argument is none of these; all are named, and
        nothing is changed.
    """
    _check(deterministic, cudnn_autotune, float16_accumulation)
    before = {switch.name: switch.requested for switch in describe()}
    names = []
    if deterministic is not None:
        _set_determinism(deterministic)
        names.append("op determinism")
    texts = {}
    if cudnn_autotune is not None:
        texts[switch_table.AUTOTUNE] = str(int(cudnn_autotune))
    if float16_accumulation is not None:
        for name, if_on in switch_table.ACCUMULATION.items():
            texts[name] = str(int(if_on == float16_accumulation))
    os.environ.update(texts)
    switches = [s for s in describe() if s.name in {*names, *texts}]
    _warn([s for s in switches if s.requested != before[s.name]])
    return switches


def _check(deterministic, cudnn_autotune, float16_accumulation):
    wrong = [
        f"{name}={value!r} (expected True, False or None)"
        for name, value in (
            ("deterministic", deterministic),
            ("cudnn_autotune", cudnn_autotune),
        )
        if not (value is None or isinstance(value, bool))
    ]
    if wrong:
        raise TypeError(f"Received: {', '.join(wrong)}.")
    if float16_accumulation not in (None, "float32", "float16"):
        raise ValueError(
            "`float16_accumulation` must be 'float32', 'float16' or None. "
            f"Received: float16_accumulation={float16_accumulation!r}."
        )


def _warn(changed):
    late = [s for s in changed if s.effective not in (s.requested, "no effect")]
    if late:
        lines = [f"{s.name}: requested {s.requested}, {s.reason}" for s in late]
        warnings.warn(
            "Switches that may not take effect: " + " | ".join(lines), stacklevel=3
        )


def _set_determinism(enabled):
    if enabled:
        tf.config.experimental.enable_op_determinism()
    else:
        config.disable_op_determinism()  # TensorFlow 2.21 has no public way back.


def snapshot() -> Snapshot:
    """Returns what `configure` may change, for `restore`."""
    return Snapshot(
        {name: os.environ.get(name) for name in OWNED},
        config.is_op_determinism_enabled(),
    )


def restore(before: Snapshot) -> None:
    """Goes back to a snapshot, exactly; kernels that have read a switch keep it."""
    for name, text in before.variables.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text
    _set_determinism(before.deterministic)


@contextlib.contextmanager
def scope(
    *,
    deterministic: bool | None = None,
    cudnn_autotune: bool | None = None,
    float16_accumulation: Literal["float32", "float16"] | None = None,
) -> Iterator[list[Switch]]:
    """Scopes `configure`: afterwards all is as before, also after an error.

    Args:
      deterministic: As for `configure`.
      cudnn_autotune: As for `configure`.
      float16_accumulation: As for `configure`.

    Yields:
      The `Switch`es asked for.
    """
    before = snapshot()
    try:
        yield configure(
            deterministic=deterministic,
            cudnn_autotune=cudnn_autotune,
            float16_accumulation=float16_accumulation,
        )
    finally:
        restore(before)


def to_markdown(switches: Sequence[Switch]) -> str:
    """Returns switches as a Markdown table."""
    head = ["switch", "set to", "requested", "effective", "default", "what, and why"]
    rows = [
        [s.name, "" if s.value is None else s.value]
        + [s.requested, s.effective, s.default, f"{s.reason} (read by {s.read_by})"]
        for s in switches
    ]
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    return "\n".join(
        "| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *escaped]
    )
