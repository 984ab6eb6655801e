"""What is being traced, and for which device.

Where a release lacks a private name, the answer is the one that turns a shortcut off.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfamp.facts import hardware, names


def _private(name: str, otherwise: Callable) -> Callable:
    return names.resolve(f"tensorflow.python.{name}", otherwise)


def _context():
    return _private("eager.context:context", lambda: None)()


def in_xla() -> bool:
    """Whether the graph being traced, or one around it, is compiled by XLA."""
    name = "ops.control_flow_util:GraphOrParentsInXlaContext"
    return _private(name, lambda graph: False)(tf.compat.v1.get_default_graph())


def watched() -> bool:
    """Whether operations are watched, as by `tf.debugging.enable_check_numerics`.

    What watches them adds operations of its own, which XLA does not compile.
    """
    return bool(getattr(_context(), "op_callbacks", True))


@contextlib.contextmanager
def during(variable: contextvars.ContextVar, value: Any) -> Iterator[None]:
    """Scopes a value of this thread."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_is_for_a_rest = contextvars.ContextVar("is_for_a_rest", default=False)


def for_a_rest() -> contextlib.AbstractContextManager[None]:
    """Scopes a step on the rest of an epoch: too rare to compile anything for it."""
    return during(_is_for_a_rest, True)


def is_for_a_rest() -> bool:
    """Whether a step on the rest of an epoch is traced, in `for_a_rest`."""
    return _is_for_a_rest.get()


def has_started() -> bool:
    """Whether TensorFlow's runtime has started, so that kernels may have run."""
    return bool(getattr(_context(), "_initialized", True))


def deterministic() -> bool:
    """Whether `tf.config.experimental.enable_op_determinism` was called."""
    return _private("framework.config:is_op_determinism_enabled", lambda: True)()


def xla_supports(devices: Iterable[str]) -> bool:
    """Whether XLA can compile one function over variables on these devices.

    Args:
      devices: Full device names; XLA needs one for all.
    """
    names = set(devices)
    kind = _kind(names.pop()) if len(names) == 1 else ""
    # A GPU that TensorFlow was not built for is a plug-in (Apple's Metal): no XLA.
    return kind == "CPU" or (kind == "GPU" and tf.test.is_built_with_gpu_support())


def one_device(values: Iterable[tf.Tensor] = ()) -> str:
    """Returns "CPU" or "GPU" if the program runs on one such device alone, else "".

    As far as tracing can tell; inside `hardware.simulated` it is that device.

    Args:
      values: Tensors or variables that must not be on another one.
    """
    if tf.distribute.has_strategy():
        return ""
    if simulated := hardware.simulated_device():
        return simulated.kind
    devices = tf.config.get_visible_devices()
    kinds = [x.device_type for x in devices if x.device_type != "CPU"] or ["CPU"]
    if len(kinds) > 1 or not xla_supports([f"/device:{kinds[0]}:0"]):
        return ""
    alone = all(_kind(value.device) in (kinds[0], "") for value in values)
    return kinds[0] if alone else ""


def _kind(device):
    return tf.DeviceSpec.from_string(device).device_type or ""


def replicas_without_merging() -> bool:
    """Whether replicas run on their own: under XLA, and all of them on GPUs.

    Only then may a branch be taken, and a collective be used, in a replica context.
    """
    name = "distribute.merge_call_interim:strategy_supports_no_merge_call"
    return _private(name, lambda: False)()
