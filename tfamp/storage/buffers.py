"""What TensorFlow holds while it runs a graph, as far as the graph shows.

A tensor is held from the operation that makes it to the last one that takes it;
functions are looked into, branches by the larger one, loops by one turn. On a CPU
operations are taken in the order in which they were made. On a GPU they are taken as
TensorFlow's executor takes them, which has no kernel of a GPU wait in a thread of its
own: from one queue, to which an operation is added when its last input is there
(tensorflow/core/common_runtime/executor.cc, `ScheduleReady`). Convolutions there hold
copies of some of their tensors as well (tensorflow/core/kernels/conv_grad_input_ops.cc,
conv_grad_filter_ops.cc and conv_ops_impl.h).
"""

import collections
import contextlib
import graphlib
import re
from typing import Any

import tensorflow as tf

from tfamp.inspect import launches

# What passes a buffer on, and makes none.
_SAME = frozenset(
    "EnsureShape ExpandDims Identity IdentityN PreventGradient ReadVariableOp Reshape "
    "Squeeze StopGradient".split()
)
# Whose result takes the place of an input that nothing else takes.
_IN_PLACE = frozenset(
    "Abs Add AddN AddV2 BiasAdd Div DivNoNan Elu EluGrad Erf Exp LeakyRelu "
    "LeakyReluGrad Log LogSoftmax Maximum Minimum Mul Neg Pow RealDiv Relu Relu6 "
    "Relu6Grad ReluGrad Rsqrt RsqrtGrad SelectV2 Selu SeluGrad Sigmoid SigmoidGrad "
    "Softmax SoftmaxCrossEntropyWithLogits Softplus SoftplusGrad "
    "SparseSoftmaxCrossEntropyWithLogits Sqrt SqrtGrad Square SquaredDifference Sub "
    "Tanh TanhGrad".split()
)
_CONVOLUTION = re.compile(r"Conv[23]D(Backprop\w+?)?(?:V2)?")
# Known before the step where shapes are: TensorFlow folds them.
_FOLDED = frozenset(("Rank", "Shape", "ShapeN", "Size"))


class Program:
    """The operations of a graph and of its functions, and the buffers between them.

    Args:
      kind_of: Function of a tensor: its kind, and the layer that it belongs to.
      on_gpu: Whether a GPU runs them.

    Attributes:
      convolved: Bytes of the largest result of a convolution by cuDNN; 0 without one.
      unknown: Tensors whose size is not known, and which are not counted.
      loops: Loops, of which one turn is counted.
    """

    def __init__(self, kind_of, on_gpu=False):
        self.kind_of, self.on_gpu = kind_of, on_gpu
        self.unknown, self.loops, self.convolved = 0, 0, 0
        # Kinds of operations, and the buffers that each takes and makes.
        self.steps: list[tuple[str, list[int], list[int]]] = []
        self.counts: list[int] = []  # Elements of a buffer,
        self.sizes: list[int] = []  # and its bytes.
        self.kinds: list[tuple[str, Any]] = []

    def add(self, graph, inputs=(), kind=None):
        """Adds a graph; returns the buffers of its outputs.

        Args:
          graph: A `FuncGraph`.
          inputs: The buffers of its first inputs.
          kind: That of its buffers, for a function.
        """
        buffers = {id(x): b for x, b in zip(graph.inputs, inputs, strict=False)}
        same: dict[Any, list[int]] = {}
        for op in _ordered(graph, self.on_gpu):
            if op.type == "Placeholder":
                continue
            taken = [buffers.get(id(x)) for x in op.inputs]
            self.loops += op.type.endswith("While")
            if (inner := _function_of(op)) is not None:
                passed = taken[1:] if op.type.endswith("If") else taken
                its_kind = self.kind_of(op.outputs[0]) if op.outputs else None
                results = self.add(inner, passed, kind or its_kind)
            elif op.type in _SAME:
                results = taken
            elif op.type in _FOLDED:
                results = []
            else:
                own = tuple(b or id(x) for b, x in zip(taken, op.inputs, strict=True))
                # TensorFlow computes once what is there twice.
                key = op if op.op_def.is_stateful else (own, *_settings(op))
                if key not in same:
                    takes = [b for b in taken if b is not None]
                    results = [self._buffer(x, takes, kind) for x in op.outputs]
                    inside = _copied(op) if self.on_gpu else []
                    if inside:
                        self.convolved = max(self.convolved, self.sizes[results[0]])
                    inside += _scattered(op)
                    inner = [self._buffer(x, results, kind) for x in inside]
                    self.steps.append((op.type, takes, results + inner))
                    same[key] = results
                results = same[key]
            buffers |= {id(x): b for x, b in zip(op.outputs, results, strict=False)}
        return [buffers.get(id(x)) for x in graph.outputs]

    def _buffer(self, tensor, takes, kind):
        counted = tensor.dtype not in (tf.resource, tf.variant, tf.string)
        count = tensor.shape.num_elements()
        if count is None:  # Open sizes, as of a kernel compiled for all of them.
            count = max((self.counts[b] for b in takes), default=0)
            self.unknown += counted and not count
        self.counts.append(count * counted)
        self.sizes.append(tensor.dtype.size * count * counted)
        own = self.kind_of(tensor)
        self.kinds.append(own if kind is None or own[0] == "gradients" else kind)
        return len(self.sizes) - 1

    def peak(self) -> dict[tuple[str, Any], int]:
        """Returns bytes by kind and layer, where the sum is largest."""
        last = {b: i for i, (_, *both) in enumerate(self.steps) for b in sum(both, [])}
        held = highest = at = 0
        made_at = {}
        for i, (kind, takes, makes) in enumerate(self.steps):
            ends = {b for b in (*takes, *makes) if last[b] == i}
            left = {self.sizes[b] for b in ends.difference(makes)}
            made_at |= dict.fromkeys(makes, i)
            held += sum(self.sizes[b] for b in makes)
            spared = max((self.sizes[b] for b in makes), default=0)
            now = held - spared * (kind in _IN_PLACE and spared in left)
            if now > highest:
                highest, at = now, i
            held -= sum(self.sizes[b] for b in ends)
        totals = collections.Counter()
        for b, first in made_at.items():
            if first <= at <= last[b]:
                totals[self.kinds[b]] += self.sizes[b]
        return dict(totals)


def _ordered(graph, queued):
    """Returns the operations that the outputs need, in the order of the docstring."""
    needed = _needed(graph)
    operations = [op for op in graph.get_operations() if op in needed]
    if not queued:
        return operations
    before = {op: {*(x.op for x in op.inputs), *op.control_inputs} for op in operations}
    sorter = graphlib.TopologicalSorter(before)
    with contextlib.suppress(graphlib.CycleError):  # A loop of TensorFlow 1.
        sorter.prepare()
    order, stack, queue = [], [], collections.deque(sorter.get_ready())
    while queue or stack:
        order.append(op := queue.popleft() if queue else stack.pop())
        sorter.done(op)
        ready = sorter.get_ready()
        if _is_compiled(op):
            stack += reversed(ready)
        else:
            queue += ready
    return order


def _copied(op):
    """Returns tensors of which a convolution on a GPU holds a copy while it runs.

    Of its weights, since cuDNN wants them in another order; of its result, where that
    is a gradient; and of its images, where it pads them on one side only.
    """
    kind = _CONVOLUTION.fullmatch(op.type)
    if not kind or launches.is_product(op):
        return []
    images = op.outputs[0] if kind[1] == "BackpropInput" else op.inputs[0]
    weights = op.outputs[0] if kind[1] == "BackpropFilter" else op.inputs[1]
    copies = [weights] + [images] * (kind[1] == "BackpropInput")
    return copies + [images] * _pads_one_side(op, images, weights)


def _pads_one_side(op, images, weights):
    if op.get_attr("padding") != b"SAME" or images.shape.rank is None:
        return False
    last = op.get_attr("data_format").endswith(b"C")
    axes = slice(1, -1) if last else slice(2, None)
    steps, sizes = op.get_attr("strides")[axes], images.shape[axes]
    kernels = weights.shape[: len(steps)]
    dimensions = zip(sizes, kernels, steps, strict=True)
    return any(
        max((-(-size // step) - 1) * step + kernel - size, 0) % 2
        for size, kernel, step in dimensions
        if size and kernel
    )


def _needed(graph):
    needed, queue = set(), [x.op for x in graph.outputs] + [*graph.control_outputs]
    while queue:
        op = queue.pop()
        if op not in needed:
            needed.add(op)
            queue += [x.op for x in op.inputs] + [*op.control_inputs]
    return needed


def _function_of(op):
    """Returns the graph that an operation runs; of two branches the larger one.

    None for what XLA compiles: it joins operations, and keeps little between them.
    """
    if _is_compiled(op):
        return None
    names = [_name(op, x) for x in ("f", "body", "then_branch", "else_branch")]
    graphs = [op.graph._get_function(x).graph for x in names if x]
    return max(graphs, key=lambda x: len(x.get_operations()), default=None)


def _scattered(op):
    """Returns what a compiled operation holds inside: sums of rows are not fused."""
    if not _is_compiled(op) or not _name(op, "f"):
        return []
    inner = op.graph._get_function(_name(op, "f")).graph.get_operations()
    return [x.outputs[0] for x in inner if x.type == "UnsortedSegmentSum"]


def _is_compiled(op):
    return _has(op, "_XlaMustCompile") and op.get_attr("_XlaMustCompile")


def _settings(op):
    attributes = op.node_def.attr
    return op.type, *(attributes[x].SerializeToString() for x in sorted(attributes))


def _name(op, attribute):
    return op.get_attr(attribute).name if _has(op, attribute) else ""


def _has(op, attribute):
    return attribute in op.node_def.attr
