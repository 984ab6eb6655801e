"""What the tests share: the process' globals, and small models of the peers' rules."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.optimizers import base_optimizer
from tensorflow.python.framework import ops as tf_ops

from tfamp import hardware
from tfamp.kernels import bias_gradient, keras_kernels, row_gradients
from tfamp.loss_scaling import rule as loss_scale

# ---- The process' globals, as conftest.py saves, compares and restores them ----

HOOKED = (
    "compile",
    "make_train_function",
    "__call__",
    "_open_name_scope",
    "from_config",
    "build_from_config",
    "make_test_function",
    "make_predict_function",
)


class Globals(NamedTuple):
    """What a test must leave as it found it.

    Attributes:
      dtype_policy: Keras' global dtype policy, of the test's thread.
      tensor_float_32: Whether TF32 may be used.
      grappler: The options given to `tf.config.optimizer`.
      environ: A copy of `os.environ`.
      bias_gradient: The registered gradient of `BiasAdd`.
      methods: What each class above `keras.Model` defines as one of `HOOKED`, by
        (class, name); None where it defines nothing. And Keras' functions that fused
        kernels replace.
    """

    dtype_policy: keras.dtype_policies.DTypePolicy
    tensor_float_32: bool
    grappler: dict[str, Any]
    environ: dict[str, str]
    bias_gradient: Callable
    methods: dict[tuple[type, str], Callable | None]


_FUSED = [
    *keras_kernels._places(),
    (base_optimizer.BaseOptimizer, "apply", None),
    (tf_optimizer.TFOptimizer, "_all_reduce_sum_gradients", None),
]
_SET_BY_PYTEST = "PYTEST_CURRENT_TEST"  # Differs between set-up, call and tear-down.


def read_globals() -> Globals:
    """Returns the globals as they stand."""
    return Globals(
        keras.config.dtype_policy(),
        tf.config.experimental.tensor_float_32_execution_enabled(),
        tf.config.optimizer.get_experimental_options(),
        {k: v for k, v in os.environ.items() if k != _SET_BY_PYTEST},
        tf_ops.gradient_registry.lookup("BiasAdd"),
        {
            (base, name): vars(base).get(name)
            for base in keras.Model.__mro__
            for name in HOOKED
        }
        | {(owner, name): vars(owner)[name] for owner, name, _ in _FUSED},
    )


def write_globals(saved: Globals) -> None:
    """Sets the globals to what `read_globals` returned before."""
    keras.config.set_dtype_policy(saved.dtype_policy)
    tf.config.experimental.enable_tensor_float_32_execution(saved.tensor_float_32)
    now = read_globals()
    # None, and not False, takes an option back to TensorFlow's default.
    options = {**dict.fromkeys(now.grappler), **saved.grappler}
    tf.config.optimizer.set_experimental_options(options)
    for name in now.environ.keys() - saved.environ.keys():
        del os.environ[name]
    os.environ.update(saved.environ)
    bias_gradient.remove()
    keras_kernels.remove()
    row_gradients.remove()
    for (base, name), function in saved.methods.items():
        if vars(base).get(name) is function:
            continue
        if function is None:
            delattr(base, name)
        else:
            setattr(base, name, function)


def find_leaks(before: Globals, after: Globals) -> list[str]:
    """Returns one line for each global that differs."""
    leaks = [
        f"{name}: {old!r} became {new!r}"
        for name, old, new in (
            # Keras 3.15 cannot compare two policy maps.
            ("dtype policy", before.dtype_policy.name, after.dtype_policy.name),
            ("TF32 flag", before.tensor_float_32, after.tensor_float_32),
            ("gradient of BiasAdd", before.bias_gradient, after.bias_gradient),
        )
        if old != new
    ]
    for name, old, new in (
        ("Grappler option", before.grappler, after.grappler),
        ("environment variable", before.environ, after.environ),
    ):
        leaks += [
            f"{name} {key}: {old.get(key)!r} became {new.get(key)!r}"
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key)
        ]
    leaks += [
        f"{base.__name__}.{name} was replaced (call tfamp.disable())"
        for (base, name), function in before.methods.items()
        if after.methods.get((base, name)) is not function
    ]
    return leaks


def describe_support() -> str:
    """Returns this host's precision support as one phrase, for skip reasons."""
    return "; ".join(
        f"{device}: "
        + ", ".join(
            f"{row.format} {'fast' if row.fast else 'slow' if row.supported else 'no'}"
            for row in rows.values()
        )
        for device, rows in hardware.detect_support().items()
    )


# ---- The loss scale ----


def parse_mask(text: str) -> list[bool]:
    """Returns whether each step is finite: "+" is a finite step, "-" is not."""
    return [{"+": True, "-": False}[character] for character in text]


def as_tensors(state: loss_scale.LossScaleState) -> loss_scale.LossScaleState:
    """Returns a state of Python numbers as scalar tensors."""
    return loss_scale.LossScaleState(
        tf.constant(state.scale, "float32"),
        *(tf.constant(field, loss_scale.COUNTER_DTYPE) for field in state[1:]),
    )


def run_mask(
    config: loss_scale.LossScaleConfig,
    mask: Iterable[bool],
    wrap: Callable = lambda step: step,
) -> list[loss_scale.LossScaleState]:
    """Runs `next_state` over a mask; returns the state after each step, in NumPy.

    Args:
      config: A `LossScaleConfig`.
      mask: Whether the gradients of each step are finite.
      wrap: Compiles the step, for example `tf.function`.
    """
    step = wrap(lambda state, finite: loss_scale.next_state(config, state, finite))
    state = as_tensors(config.initial_state())
    states = []
    for finite in mask:
        state = step(state, tf.constant(finite))
        states.append(loss_scale.LossScaleState(*(field.numpy() for field in state)))
    return states


# Each peer's rule as its source reads, in float32. A row is the state after a step.


def keras_rule(mask, initial_scale, growth_interval):
    """Keras 3 `LossScaleOptimizer`: rows of (dynamic_scale, step_counter)."""
    scale, counter, rows = np.float32(initial_scale), 0, []
    for finite in mask:
        if not finite:
            scale, counter = scale * np.float32(0.5), 0
        elif counter == growth_interval - 1:
            scale, counter = scale * np.float32(2.0), 0
        else:
            counter += 1
        rows.append((scale, counter))
    return rows


def pytorch_rule(mask, initial_scale, growth_interval, growth_factor, backoff_factor):
    """PyTorch `GradScaler`: rows of (_scale, _growth_tracker)."""
    scale, tracker, rows = np.float32(initial_scale), 0, []
    for finite in mask:
        if not finite:
            scale, tracker = scale * np.float32(backoff_factor), 0
        elif tracker + 1 == growth_interval:
            scale, tracker = scale * np.float32(growth_factor), 0
        else:
            tracker += 1
        rows.append((scale, tracker))
    return rows


def megatron_rule(
    mask,
    initial_scale,
    min_scale,
    growth_interval,
    growth_factor,
    backoff_factor,
    hysteresis,
):
    """Megatron-LM `DynamicGradScaler`: (scale, growth_tracker, hysteresis_tracker)."""
    scale, growth_tracker, rows = np.float32(initial_scale), 0, []
    hysteresis_tracker = hysteresis
    for finite in mask:
        if not finite:
            growth_tracker = 0
            hysteresis_tracker -= 1
            if hysteresis_tracker <= 0:
                backed_off = scale * np.float32(backoff_factor)
                scale = max(backed_off, np.float32(min_scale))
        else:
            growth_tracker += 1
            if growth_tracker == growth_interval:
                growth_tracker = 0
                hysteresis_tracker = hysteresis
                scale = scale * np.float32(growth_factor)
        rows.append((scale, growth_tracker, hysteresis_tracker))
    return rows


# ---- Scripts ----


class Finished(NamedTuple):
    """How a script ended."""

    returncode: int
    stdout: str
    stderr: str


def run_scripts(cases: Iterable[tuple[str, list[str], str | os.PathLike]]):
    """Runs scripts one after another; see run_scripts.py.

    Args:
      cases: (path of the script, arguments, working directory) of each.

    Returns:
      A list of `Finished`.
    """
    request = [
        {"script": str(script), "arguments": arguments, "cwd": str(cwd)}
        for script, arguments, cwd in cases
    ]
    done = subprocess.run(
        [sys.executable, str(pathlib.Path(__file__).with_name("run_scripts.py"))],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    return [Finished(**result) for result in json.loads(done.stdout)]
