"""Gradients have the formats of what they are taken by.

Inside of a gradient function, what has no kernel for 16 bits is computed in float32,
too. So what it returns is cast to the formats of the operator's inputs, and a function
that knows no gradient by 16 bits (TensorFlow's of `ResizeBicubic`) is asked in float32.
The same holds for a gradient of the user's own (`tf.custom_gradient`), and for one that
is handed to a tape: the function or loop below takes no other format.

A model's outputs are returned in float32, as copies: a gradient by one of these is that
by what the model computed its other outputs from, too.
"""

import functools
from typing import Any

import tensorflow as tf

from tfamp.facts import formats
from tfamp.keras_patches import hooks
from tfamp.operators import again


@hooks.around
def lookup(original, registry, name):
    """For where gradient functions are looked up, in each trace."""
    function = original(registry, name)
    if registry._name != "gradient" or function is None:
        return function
    # The user's, to be called once.
    is_own = tf.compat.as_str(name).startswith("CustomGradient")
    return functools.partial(_in_formats, function, is_own)


def _in_formats(function, is_own, op, *received):
    inputs = getattr(op, "inputs", None) or ()  # None where a SavedModel is traced.
    low = [i for i, x in enumerate(inputs) if again.format_of(x) in formats.LOW]
    try:
        result = again.alone(function, op, *received)
    except TypeError as error:
        result = None if is_own or not low else _in_float32(function, op, received)
        if result is None:
            raise error from None
    if not low:
        return result
    gradients = list(result) if isinstance(result, list | tuple) else [result]
    if len(gradients) != len(inputs):
        return result
    skipped = getattr(op, "skip_input_indices", None) or ()
    # What is None for 16 bits may be none in float32.
    if any(gradients[i] is None and i not in skipped for i in low):
        wide = _in_float32(function, op, received) or ()
        if len(wide) == len(gradients):
            pairs = zip(gradients, wide, strict=True)
            gradients = [y if x is None else x for x, y in pairs]
    for i in low:
        gradients[i] = again.in_format(gradients[i], inputs[i].dtype.name)
    return gradients


class _Wide:
    """An operator whose 16-bit inputs, outputs and types are float32.

    Cast where they are used, for the graph keeps what it casts.
    """

    def __init__(self, op: Any):
        self._op = op

    def get_attr(self, name: str) -> Any:
        """Returns an attribute."""
        return again.wide_argument(self._op.get_attr(name))

    def __getattr__(self, name):
        value = getattr(self._op, name)
        return again.wide([*value]) if name in ("inputs", "outputs") else value


def _in_float32(function, op, received):
    """Returns the gradients of an operator in float32; None if it fails there, too."""
    try:
        result = again.alone(function, _Wide(op), *map(again.wide, received))
    except (TypeError, ValueError, LookupError):
        return None
    return list(result) if isinstance(result, list | tuple) else [result]


@hooks.around
def recorded(
    original,
    op_type,
    output_tensors,
    input_tensors,
    backward_function,
    forward_function=None,
):
    """For where a tape records what is no single operator, and its gradient."""
    # A closure on tensors would keep them.
    outputs = [*map(again.format_of, output_tensors)]
    inputs = [*map(again.format_of, input_tensors)]
    if backward_function and any(x in formats.LOW for x in (*outputs, *inputs)):
        whole = backward_function

        def backward_function(*received):
            result = again.alone(whole, *_in_each(received, outputs))
            return _in_each(result, inputs)

    return original(
        op_type, output_tensors, input_tensors, backward_function, forward_function
    )


def _in_each(values, wanted):
    """Returns gradients in one format each, if there are as many."""
    values = [*values] if isinstance(values, list | tuple) else [values]
    if len(values) != len(wanted):
        return values
    return [again.in_format(x, y) for x, y in zip(values, wanted, strict=True)]


@hooks.around
def by_outputs(
    original,
    tape,
    target,
    sources,
    output_gradients=None,
    unconnected_gradients=tf.UnconnectedGradients.NONE,
):
    """For `tf.GradientTape.gradient`."""
    if output_gradients is not None:
        targets = [again.format_of(x) for x in tf.nest.flatten(target)]
        output_gradients = _in_each(tf.nest.flatten(output_gradients), targets)
    flat = tf.nest.flatten(sources)
    narrow = [x.narrow for x in flat if hasattr(x, "narrow")]
    if not narrow:
        return original(tape, target, sources, output_gradients, unconnected_gradients)
    both = original(tape, target, [*flat, *narrow], output_gradients)
    gradients, others = both[: len(flat)], iter(both[len(flat) :])
    gradients = [
        _whole(y, next(others)) if hasattr(x, "narrow") else y
        for x, y in zip(flat, gradients, strict=True)
    ]
    if unconnected_gradients != tf.UnconnectedGradients.NONE:
        pairs = zip(flat, gradients, strict=True)
        gradients = [tf.zeros_like(x) if y is None else y for x, y in pairs]
    return tf.nest.pack_sequence_as(sources, gradients)


def _whole(by_copy, by_original):
    """Returns the gradient by a copy in float32 and all that its original went to."""
    if by_original is None:
        return by_copy
    whole = tf.cast(by_original, "float32")
    if by_copy is None:
        return whole
    # The original's has the copy's in it, rounded: the rest is what went elsewhere.
    rest = whole - tf.cast(tf.cast(by_copy, by_original.dtype), "float32")
    return by_copy + tf.where(tf.math.is_finite(rest), rest, tf.zeros_like(rest))
