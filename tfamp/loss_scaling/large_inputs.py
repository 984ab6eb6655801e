"""Inputs beyond float16: a column of prices above 65,504 is infinite in it.

What a model gets from the user's code is followed to the float16 layer that takes it.
Only a step that was skipped looks at the values: no other one has anything to do.
"""

import threading
import weakref
from typing import Any

import keras
import tensorflow as tf

_LARGEST = float(tf.float16.max)


class _Call(threading.local):
    """The last call of a model by the user's code, in this thread.

    Attributes:
      given: {id of an input in float32: its name}, of those that no layer took yet.
      rounded: (name, reference to the tensor) of those that a float16 layer took.
    """

    given: dict[int, str] = {}
    rounded: list[tuple[str, Any]] = []


_call = _Call()
# Of a `LossScaleOptimizer`: names of inputs, and their largest magnitudes.
_peaks: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def look(layer: keras.layers.Layer, args: tuple, begins: bool) -> None:
    """Notes the inputs that a layer takes in float16; models of a graph take none.

    Args:
      layer: A layer that is called.
      args: With what.
      begins: Whether it is a model, and the user's code calls it.
    """
    if begins and args:
        _begin(layer, args[0])
    functional = hasattr(layer, "operations") or isinstance(layer, keras.Sequential)
    if not _call.given or layer.compute_dtype != "float16" or functional:
        return
    for x in keras.tree.flatten(args):
        if name := _call.given.pop(id(x), None):
            _call.rounded.append((name, weakref.ref(x)))


def _begin(model, inputs):
    flat = keras.tree.flatten(inputs)
    known = getattr(model, "inputs", None) or ()
    names = [x.name for x in known] if len(known) == len(flat) else []
    if not names and isinstance(inputs, dict):
        names = sorted(inputs)
    named = len(names) == len(flat) and "keras_tensor" not in str(names)
    names = names if named else [f"input {i}" for i in range(len(flat))]
    _call.rounded = []
    _call.given = {
        id(x): name
        for name, x in zip(names, flat, strict=True)
        if isinstance(x, tf.Tensor) and x.dtype in (tf.float32, tf.float64)
    }


def record(optimizer: Any, finite: Any) -> None:
    """Notes, in a step that is skipped, how large the inputs in float16 are.

    Args:
      optimizer: The `LossScaleOptimizer` that may skip it.
      finite: Whether it does not: bool [].
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    # That of the step, or in a branch or program of it.
    graphs = graph, getattr(graph, "outer_graph", None)
    found = [(name, ref()) for name, ref in _call.rounded]
    found = [(n, x) for n, x in found if x is not None and _graph(x) in graphs]
    if not found:
        return
    names, inputs = zip(*found, strict=True)
    if _peaks.get(optimizer, ((),))[0] != names:
        with tf.init_scope():
            _peaks[optimizer] = names, tf.Variable(tf.zeros(len(names)))
    peaks = _peaks[optimizer][1]
    largest = [tf.cast(tf.reduce_max(tf.abs(x)), "float32") for x in inputs]
    larger = tf.maximum(peaks, tf.stack(largest))
    peaks.assign(tf.where(finite, peaks.read_value(), larger))


def _graph(tensor):
    return None if hasattr(tensor, "numpy") else tensor.graph


def describe(optimizer: Any) -> str:
    """Returns what to say of inputs that float16 cannot hold; empty if all fit."""
    if optimizer not in _peaks:
        return ""
    names, peaks = _peaks[optimizer]
    pairs = zip(names, peaks.numpy().tolist(), strict=True)
    peaks.assign(tf.zeros(len(names)))  # Of the steps since then.
    large = [(x, peak) for x, peak in pairs if _LARGEST < peak < float("inf")]
    listed = ", ".join(f"{name!r} up to {peak:g}" for name, peak in large)
    return (
        f"Inputs overflow float16, whose largest number is {_LARGEST:g}: {listed}. "
        "Scale them, for example with a Normalization layer before all others, or "
        "name the layer that takes them in overrides={...: 'float32'}."
        if large
        else ""
    )
