"""Checks what `audit` was given, before anything is traced or timed."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from tfamp import checks
from tfamp.diagnostics import devices
from tfamp.graph_rewrite import switch as graph_rewrite

_REWRITES = ("bfloat16", "float16")


def check_model(model: Any) -> None:
    """Raises unless it is a built Keras model."""
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a Keras model. Received: {model!r}.")
    if not model.built:
        raise ValueError(
            f"Model {model.name!r} is not built, so that its layers are not known. "
            "Call it on a batch, or build it, first."
        )


def check(
    about: devices.Subject,
    *,
    batch_size: int | None,
    jit_compile: Any,
    bias_gradient_fixed: bool | None,
    tensor_float_32: bool | None,
    rewrite: str | None,
    dataset: Iterable | None,
    pipeline_seconds: float | None,
    step_seconds: float | None,
) -> None:
    """Raises one error with all that is wrong in the arguments of `audit`.

    Args:
      about: The device.
      batch_size: As for `audit`, like all others.
      jit_compile: A bool, "auto" or None.
      bias_gradient_fixed: A bool or None.
      tensor_float_32: A bool or None.
      rewrite: "bfloat16", "float16" or None.
      dataset: Batches, or None.
      pipeline_seconds: A number of at least 0, or None.
      step_seconds: A number of at least 0, or None.

    Raises:
      ValueError: Or TypeError if that is all.
    """
    problems: list[Exception] = []

    def note(test: Callable, *arguments):
        try:
            test(*arguments)
        except (TypeError, ValueError) as error:
            problems.append(error)

    if batch_size is not None:
        note(checks.check_count, "batch_size", batch_size)
    note(_check_jit_compile, jit_compile)
    note(_check_bool, "bias_gradient_fixed", bias_gradient_fixed)
    note(_check_bool, "tensor_float_32", tensor_float_32)
    note(_check_rewrite, rewrite, about)
    note(_check_seconds, "pipeline_seconds", pipeline_seconds)
    note(_check_seconds, "step_seconds", step_seconds)
    if dataset is not None:
        note(_check_dataset, dataset, pipeline_seconds, step_seconds)
        note(_check_place, about, step_seconds)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        text = "\n".join(f"- {problem}" for problem in problems)
        kinds = {type(problem) for problem in problems}
        kind = TypeError if kinds == {TypeError} else ValueError
        raise kind(f"{len(problems)} arguments of `audit` are wrong:\n{text}")


def _is_bool(value):
    return isinstance(value, bool | np.bool_)


def _check_bool(name, value):
    if value is not None and not _is_bool(value):
        raise TypeError(
            f"`{name}` must be a bool, or None for as it stands. "
            f"Received: {name}={value!r}."
        )


def _check_jit_compile(value):
    is_auto = isinstance(value, str) and value == "auto"
    if value is not None and not is_auto and not _is_bool(value):
        raise ValueError(
            '`jit_compile` must be a bool, "auto" for Keras\' own choice, or None for '
            f"as the model was compiled. Received: jit_compile={value!r}."
        )


def _check_rewrite(value, about):
    if value is None:
        return
    if not isinstance(value, str) or value not in _REWRITES:
        raise ValueError(
            f"`rewrite` must be one of {', '.join(map(repr, _REWRITES))}, or None for "
            f"as it stands. Received: rewrite={value!r}."
        )
    # Refuses what TensorFlow would silently not do on that device.
    environ = {} if about.simulated else os.environ
    graph_rewrite.choose_dtype(value, [about.device], environ)


def _check_seconds(name, value):
    if value is None:
        return
    checks.check_real(name, value)
    if value < 0:
        raise ValueError(
            f"`{name}` must be at least 0 seconds. Received: {name}={value}."
        )


def _check_dataset(dataset, pipeline_seconds, step_seconds):
    if isinstance(dataset, str | bytes) or not isinstance(dataset, Iterable):
        raise TypeError(
            "`dataset` must yield batches, as a `tf.data.Dataset` does. "
            f"Received: dataset={dataset!r}."
        )
    if pipeline_seconds is not None and step_seconds is not None:
        raise ValueError(
            "With `pipeline_seconds` and `step_seconds` there is nothing to time. "
            "Received a `dataset`, too. Leave out one of the three."
        )


def _check_place(about, step_seconds):
    if about.simulated and step_seconds is None:
        raise ValueError(
            f"A step cannot be timed on {about.label}. Received: `dataset` without "
            "`step_seconds`. Pass the time of a step there, or audit this host."
        )
