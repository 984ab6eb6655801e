"""Counts the matrix work of one training step from its graph, without running it.

    | operation                              | floating-point operations       |
    | matrix product, Einsum, convolution    | 2 m n k, see `products`         |
    | gradient to a convolution's filter     | as the convolution              |
    | gradients of a depthwise convolution   | as the convolution              |
    | recurrent layer in one kernel of cuDNN | 2 for each weight, row and step |
    | its gradients                          | twice that                      |

Not by `tf.compat.v1.profiler`: forward its counts agree, but backward those of
TensorFlow 2.21 do not. For `BatchMatMul` it reads an attribute that the operation does
not have, so that transposed operands are counted wrongly; gradients of convolutions
count by the positions of the image, more than there are products without padding; of
`Einsum`, of gradients of depthwise and 3-D convolutions, and of what is in functions
and loops, it knows nothing.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.benchmark import function_bodies, products
from tfamp.precision import model_inputs

_LOOPS = ("While", "StatelessWhile")
_GATES = {b"lstm": 4, b"gru": 3}  # Of cuDNN; others have 1.
# What may hide products, where no rule below knows them.
_SUSPECTS = re.compile(r"MatMul|Conv[23][dD]|Einsum|CudnnRNN|PyFunc|XlaDot|XlaConv")


class Operations(NamedTuple):
    """The matrix products and convolutions of a step, forward and backward.

    Attributes:
      flops: Floating-point operations, 2 for each multiply-add.
      elements: Elements of their operands and results, each moved once.
      uncounted: What is missing, or counted by an assumption, a line each.
    """

    flops: float
    elements: float
    uncounted: tuple[str, ...]


def count(model: keras.Model, loss: Callable, batch: Sequence[Any]) -> Operations:
    """Counts the operations of a forward and a backward pass; changes no variable.

    What no gradient needs does not count, such as the gradient to the images:
    TensorFlow leaves it out. Nor does the optimizer's update. Of the branches of a
    condition the one with the most work counts.

    Args:
      model: A built model.
      loss: Function of labels and outputs, such as a Keras loss.
      batch: Features and labels, as arrays or tensors; only their shapes and dtypes
        matter.

    Returns:
      An `Operations`.
    """
    graph = _trace(model, loss, batch)
    return _of_graph(graph, graph.outputs)


def _trace(model, loss, batch) -> tf.Graph:
    """Returns the graph whose outputs are the losses and the gradients."""

    def step(features, labels):
        with tf.GradientTape() as tape:
            losses = [loss(labels, model(features, training=True)), *model.losses]
        weights = [variable.value for variable in model.trainable_variables]
        return losses, tape.gradient(losses, weights)

    features, labels = (keras.tree.map_structure(_spec, part) for part in batch[:2])
    with model_inputs.unchanged(model._flatten_layers()):
        function = tf.function(step, autograph=False)
        return function.get_concrete_function(features, labels).graph


def _spec(array):
    tensor = tf.convert_to_tensor(array)
    return tf.TensorSpec(tensor.shape, tensor.dtype)


# ---- What runs, and how often ----


def _of_graph(graph, outputs) -> Operations:
    """Counts what some outputs of a graph need."""
    needed = _needed(graph, outputs)
    return _sum(_of_operation(op, wanted) for op, wanted in needed.items())


def _sum(parts: Iterable[Operations]) -> Operations:
    flops, elements, notes = 0.0, 0.0, {}
    for part in parts:
        flops, elements = flops + part.flops, elements + part.elements
        notes.update(dict.fromkeys(part.uncounted))
    return Operations(flops, elements, tuple(notes))


def _needed(graph, outputs) -> dict[tf.Operation, set[int]]:
    """Returns the operations that outputs depend on, and which results of each."""
    found: dict[tf.Operation, set[int]] = {}
    todo = [(tensor.op, {tensor.value_index}) for tensor in outputs]
    todo += [(op, set()) for op in graph.control_outputs]
    while todo:
        op, wanted = todo.pop()
        if op not in found:
            found[op] = set()
            todo += [(tensor.op, {tensor.value_index}) for tensor in op.inputs]
            todo += [(before, set()) for before in op.control_inputs]
        found[op] |= wanted
    return found


def _of_operation(op, wanted) -> Operations:
    if op.type in function_bodies.CALLS:
        return _of_call(op, wanted)
    if not _SUSPECTS.search(op.type) or op.type == "Einsum" and len(op.inputs) < 2:
        return Operations(0, 0, ())
    tensors = [t for t in (*op.inputs, *op.outputs) if t.dtype.is_floating]
    try:
        flops = _flops(op)
    except _NotKnownError as error:
        return Operations(0, 0, (f"{op.name} is not counted: {error}",))
    # cuDNN's scratch space has no known size.
    return Operations(flops, sum(t.shape.num_elements() or 0 for t in tensors), ())


def _of_call(op, wanted) -> Operations:
    graphs = list(function_bodies.bodies(op))
    if op.type in function_bodies.REPEATING:
        return _of_loop(op, graphs[0], wanted)
    parts = [
        _of_graph(graph, [graph.outputs[index] for index in wanted]) for graph in graphs
    ]
    return max(parts, key=lambda part: part.flops)


def _of_loop(op, body, wanted) -> Operations:
    is_while = op.type in _LOOPS
    outputs = _carried(body, wanted) if is_while else body.outputs
    once = _of_graph(body, outputs)
    rounds = _rounds(op) if is_while else None
    if rounds is not None:
        return once._replace(flops=once.flops * rounds, elements=once.elements * rounds)
    if not once.flops:
        return once
    note = f"{op.name} is counted once: its number of rounds is not known"
    return once._replace(uncounted=(*once.uncounted, note))


def _carried(body, wanted) -> list[tf.Tensor]:
    """Returns the results of a loop's body that its wanted results depend on."""
    places = {tensor.op: index for index, tensor in enumerate(body.inputs)}
    found, before = set(wanted), None
    while found != before:
        before = set(found)
        needed = _needed(body, [body.outputs[index] for index in found])
        found |= {places[op] for op in needed if op in places}
    return [body.outputs[index] for index in sorted(found)]


def _rounds(loop) -> int | None:
    """Returns how often a loop runs, where it counts up to a number in the graph."""
    # As in `function_bodies`: no public name in TensorFlow 2.21; guarded by the test
    # of recurrent layers.
    condition, body = (
        loop.graph._get_function(loop.get_attr(name).name).graph
        for name in ("cond", "body")
    )
    ends = _conjuncts(condition.outputs[0].op)
    limits = [_limit(loop, end, condition, body) for end in ends]
    known = [limit for limit in limits if limit is not None]
    return min(known) if len(known) == len(limits) else None


def _conjuncts(op):
    """Returns the operations whose results must all be true."""
    if op.type not in ("Identity", "LogicalAnd"):
        return [op]
    return [each for tensor in op.inputs for each in _conjuncts(tensor.op)]


def _limit(loop, less, condition, body) -> int | None:
    """Returns the rounds after which a comparison of a loop's counter is false."""
    places = {tensor.op: index for index, tensor in enumerate(condition.inputs)}
    if less.type != "Less" or less.inputs[0].op not in places:
        return None
    counter = places[less.inputs[0].op]
    bound = less.inputs[1]
    if bound.op in places:
        bound = loop.inputs[places[bound.op]]
    start, end = _number(loop.inputs[counter]), _number(bound)
    if start is None or end is None or not _adds_one(body, counter):
        return None
    return max(0, end - start)


def _number(tensor) -> int | None:
    """Returns an integer that the graph tells before it runs."""
    op = tensor.op
    if op.type == "Max":  # Keras' number of time steps.
        values = tf.get_static_value(op.inputs[0])
        return None if values is None else int(np.max(values))
    if op.type in _LOOPS and tensor.value_index == 0:
        return _rounds(op)  # What a loop counted: its gradient runs as often.
    value = tf.get_static_value(tensor)
    return None if value is None else int(value)


def _adds_one(body, place) -> bool:
    op = body.outputs[place].op
    while op.type == "Identity":
        op = op.inputs[0].op
    return (
        op.type in ("Add", "AddV2")
        and op.inputs[0].op is body.inputs[place].op
        and tf.get_static_value(op.inputs[1]) == 1
    )


# ---- Operations of one kernel ----


class _NotKnownError(Exception):
    """Why a kernel is not counted."""


def _flops(op) -> float:
    if op.outputs and op.outputs[0].dtype.is_integer:
        raise _NotKnownError("it multiplies integers")
    if op.type in products.OPERATIONS:
        flops = products.flops(op)
        if flops is None:
            raise _NotKnownError("a shape is not known")
        return flops
    if op.type in _OTHERS:
        return _OTHERS[op.type](op)
    raise _NotKnownError(f"no rule for {op.type}")


def _shape(tensor) -> list[int]:
    if not tensor.shape.is_fully_defined():
        raise _NotKnownError("a shape is not known")
    return tensor.shape.as_list()


def _size(tensor) -> int:
    return math.prod(_shape(tensor))


def _filter_gradient(op):
    kernel = _shape(op.outputs[0])
    return 2 * math.prod(kernel[:-1]) * _size(op.inputs[2])


def _depthwise_gradient(op):
    kernel = op.outputs[0] if op.type.endswith("Filter") else op.inputs[1]
    return 2 * math.prod(_shape(kernel)[:2]) * _size(op.inputs[2])


def _cudnn(op):
    """Of one layer in one direction, which is how Keras calls it."""
    inputs, state = _shape(op.inputs[0]), _shape(op.inputs[1])
    layers, _, units = state
    if layers != 1:
        raise _NotKnownError(f"no rule for {layers} layers of cuDNN in one")
    steps, features = math.prod(inputs[:2]), inputs[2]
    weights = _GATES.get(op.get_attr("rnn_mode"), 1) * units * (features + units)
    return 2 * steps * weights


def _cudnn_gradient(op):
    return 2 * _cudnn(op)


_OTHERS: dict[str, Callable[[tf.Operation], float]] = {
    "Conv2DBackpropFilter": _filter_gradient,
    "Conv3DBackpropFilterV2": _filter_gradient,
    "DepthwiseConv2dNativeBackpropFilter": _depthwise_gradient,
    "DepthwiseConv2dNativeBackpropInput": _depthwise_gradient,
    "CudnnRNN": _cudnn,
    "CudnnRNNV2": _cudnn,
    "CudnnRNNV3": _cudnn,
    "CudnnRNNBackprop": _cudnn_gradient,
    "CudnnRNNBackpropV2": _cudnn_gradient,
    "CudnnRNNBackpropV3": _cudnn_gradient,
}
