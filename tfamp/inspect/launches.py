"""How many kernels a training step launches on a GPU, counted in its graph.

TensorFlow's graph optimizer is run for the GPU, which need not be there. What it leaves
of the graph is what the executor starts, node by node: a kernel or two each, or nothing
(`_kernels`). TensorFlow registers its GPU kernels on machines without a GPU, too, and
a registration tells what a kernel wants in the host's memory.
"""

import collections
import re
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.facts import hardware
from tfamp.inspect import gpu_graph, traces

PARTS = ("forward", "backward", "update")
_SCOPES = ("forward", "gradient_tape", "update")
_PART = re.compile(rf"(?:^|/)({'|'.join(_SCOPES)})(?:_\d+)?/")
_LOOPS = ("Enter", "Exit", "LoopCond", "Merge", "NextIteration", "Switch")
# What starts nothing: views of memory, handles, lists of tensors, control flow.
_FREE = frozenset(
    "AssignVariableOp Bitcast Const EmptyTensorList EnsureShape ExpandDims Identity "
    "IdentityN NoOp Placeholder PreventGradient ReadVariableOp Reshape Shape ShapeN "
    "Snapshot Squeeze StopGradient TensorListGetItem TensorListPopBack "
    "TensorListPushBack TensorListReserve TensorListSetItem VarHandleOp".split()
)
# Kernels of a node, where they are not one.
_SEVERAL = {
    "SoftmaxCrossEntropyWithLogits": 6,
    "SparseSoftmaxCrossEntropyWithLogits": 6,
    "UnsortedSegmentSum": 2,
}
_SUMS = frozenset("All Any Max Mean Min Prod Sum".split())
_LONG_SUM = 4096  # Elements of a sum, from which on it takes two kernels.
_PRODUCTS = frozenset("BatchMatMulV2 BatchMatMulV3 Einsum MatMul".split())
_CONVOLUTIONS = re.compile(r"(Depthwise)?Conv[23]D|DepthwiseConv2dNative|CudnnRNN")
# XLA on a GPU makes a CUDA graph of as many kernels (2.21: graph_min_graph_size).
_LEAST_GRAPH = 5
_KERNELS = "tensorflow.python.framework.kernels:get_registered_kernels_for_op"


class Launches(NamedTuple):
    """What a training step starts on a GPU.

    Attributes:
      parts: Launches by part of the step: "forward" with loss and metrics, "backward"
        and "update"; or of "step" as a whole, if XLA compiles it.
      casts: How many of them change the format of numbers, and do nothing else.
      copies: Tensors that are copied to the host within a step, which waits for them.
      graphs: How many launches are CUDA graphs, of many kernels each, made by XLA.
      moved: Bytes that the launches read and write; None where XLA joins them.
    """

    parts: dict[str, int]
    casts: int
    copies: int
    graphs: int
    moved: int | None

    @property
    def total(self) -> int:
        """All launches of a step."""
        return sum(self.parts.values())


def count(graph: tf.Graph, device: hardware.DeviceDescription) -> Launches:
    """Counts the launches of a step that TensorFlow's executor runs.

    Args:
      graph: The graph of a function. Forward pass and update are in name scopes
        "forward" and "update"; TensorFlow names gradients itself.
      device: A GPU.

    Raises:
      ImportError: If this release of TensorFlow lacks a name that this needs.
    """
    return _Counted(gpu_graph.optimized(graph, device)).launches()


def count_compiled(graph: tf.Graph) -> Launches:
    """Counts the launches of a step that XLA compiles: one graph of kernels.

    A convolution is a call of cuDNN, which stays outside: the graph ends before it, and
    another one begins after it.
    """
    nodes = traces.all_nodes(graph.as_graph_def())
    calls = sum(bool(_CONVOLUTIONS.match(node.op)) for node in nodes)
    return Launches({"step": 2 * calls + 1}, 0, 0, calls + 1, None)


def refused_by_xla(graph: tf.Graph) -> list[str]:
    """Returns the kinds of operators that XLA does not compile for a GPU."""
    # XLA registers its operators when it first compiles.
    tf.function(lambda x: x + 1, jit_compile=True, autograph=False)(tf.ones(()))
    registered = gpu_graph.resolved(_KERNELS)
    kinds = {node.op for node in traces.all_nodes(graph.as_graph_def())}
    kinds -= {"Placeholder", "NoOp", "Const"}
    devices = {kind: {k.device_type for k in registered(kind).kernel} for kind in kinds}
    # A function of the graph's own has no kernels.
    return sorted(k for k, on in devices.items() if on and "XLA_GPU_JIT" not in on)


class _Counted:
    """An optimized graph, and where its nodes run."""

    def __init__(self, definition):
        self.nodes = {node.name: node for node in definition.node}
        self.library = {f.signature.name: f for f in definition.library.function}
        with tf.Graph().as_default() as self.graph:  # It infers shapes.
            tf.import_graph_def(definition, name="")
        self.registered = gpu_graph.resolved(_KERNELS)
        self.kernels: dict[Any, Any] = {}
        self.turns = gpu_graph.Loops(self.graph).turns
        nodes = self.graph.get_operations()
        self.hosted = {op: self._in_host_memory(op) for op in nodes}

    def launches(self) -> Launches:
        parts, counts = dict.fromkeys(PARTS, 0), collections.Counter()
        part_of: dict[tf.Operation, int] = {}
        on_host: set[str] = set()  # A tensor is copied once, whoever takes it.
        for op in self.graph.get_operations():
            turns = self.turns(op)
            number, is_graph = self._launched(op)
            if named := _PART.search(op.name):
                part_of[op] = _SCOPES.index(named[1])
            else:  # It belongs to the part of what it takes.
                part_of[op] = max((part_of.get(x.op, 0) for x in op.inputs), default=0)
            parts[PARTS[part_of[op]]] += turns * number
            counts["casts"] += turns * number * (op.type == "Cast")
            counts["graphs"] += turns * is_graph
            if number:
                counts["moved"] += turns * sum(map(_bytes, [*op.inputs, *op.outputs]))
            copied = {x.name for x in self._taken_to_host(op)} - on_host
            counts["copies"] += turns * len(copied)
            on_host |= copied
        return Launches(parts, *(counts[x] for x in Launches._fields[1:]))

    def _launched(self, op):
        """Returns how many launches a node is, and whether it is a CUDA graph."""
        if (called := self._called(self.nodes[op.name])) is not None:
            kernels = self._kernels_of(called)
            is_graph = kernels >= _LEAST_GRAPH
            return (1 if is_graph else kernels), is_graph
        taken, made = self.hosted[op]
        if op.type in _FREE or op.type in _LOOPS or all(made or taken):
            return 0, False
        return _kernels(op), False

    def _called(self, node):
        """Returns the function that a node has XLA run; None for other nodes."""
        if not node.op.endswith("PartitionedCall"):
            return None
        return self.library[node.attr["f"].func.name]

    def _kernels_of(self, function):
        """Estimates what XLA makes of a function.

        One kernel of each product, each sum and each write of a variable, and one of
        each other result: it fuses what is elementwise into those.
        """
        nodes = {node.name: node for node in function.node_def}
        own = sum(map(_is_own_kernel, nodes.values()))
        called = filter(None, map(self._called, nodes.values()))
        ends = {_behind_views(nodes, result) for result in function.ret.values()} - {""}
        others = sum(not _is_own_kernel(nodes[name]) for name in ends)
        return max(own + sum(map(self._kernels_of, called)) + others, 1)

    # ---- Memory of the host ----

    def _in_host_memory(self, op):
        """Returns which inputs of a node are in the host's memory, and which results.

        All are of a node without a GPU kernel, which runs on the host.
        """
        node, kernel = self.nodes[op.name], self._kernel(op)
        runs_xla = self._called(node) is not None

        def is_hosted(name):
            return not runs_xla and (kernel is None or name in kernel.host_memory_arg)

        arguments = op.op_def.input_arg, op.op_def.output_arg
        return [[*map(is_hosted, _flat(each, node))] for each in arguments]

    def _kernel(self, op):
        """Returns the GPU kernel of a node, or None."""
        node = self.nodes[op.name]
        types = {
            x.name: {*node.attr[x.name].list.type}
            if x.type == "list(type)"
            else {node.attr[x.name].type}
            for x in op.op_def.attr
            if x.type in ("type", "list(type)")
        }
        label = node.attr["_kernel"].s.decode() if "_kernel" in node.attr else ""
        key = op.type, label, *(frozenset(x) for x in types.values())
        if key not in self.kernels:
            fitting = {
                kernel.device_type: kernel
                for kernel in self.registered(op.type).kernel
                if kernel.label == label
                and all(
                    types.get(c.name, set()) <= {*c.allowed_values.list.type}
                    for c in kernel.constraint
                )
            }
            self.kernels[key] = fitting.get("GPU", fitting.get("DEFAULT"))
        return self.kernels[key]

    def _taken_to_host(self, op):
        """Returns the tensors of the device that a node takes in the host's memory."""
        if op.type in _FREE:
            return []
        pairs = zip(op.inputs, self.hosted[op][0], strict=True)
        return [x for x, is_hosted in pairs if is_hosted and self._is_on_device(x)]

    def _is_on_device(self, tensor):
        if tensor.op.type == "Placeholder" or tensor.dtype in (tf.resource, tf.variant):
            return False
        return not self.hosted[tensor.op][1][tensor.value_index]


def _is_own_kernel(node):
    writes = node.op.startswith("Assign") and node.op.endswith("VariableOp")
    return node.op in _PRODUCTS or node.op in _SUMS or writes


def _behind_views(nodes, result):
    """Returns the node of a function that computes a result; "" for an input."""
    name = result.split(":")[0]
    while name in nodes and (nodes[name].op in _FREE or nodes[name].op == "Cast"):
        name = nodes[name].input[0].split(":")[0] if nodes[name].input else ""
    return name if name in nodes else ""


def _flat(arguments, node):
    """Yields the name of the argument that each tensor of a node belongs to."""
    for each in arguments:
        number = 1
        if each.number_attr:
            number = node.attr[each.number_attr].i
        elif each.type_list_attr:
            number = len(node.attr[each.type_list_attr].list.type)
        yield from [each.name] * number


def _size(tensor):
    return tensor.shape.num_elements() or 0


def _bytes(tensor):
    counted = tensor.dtype not in (tf.resource, tf.variant, tf.string)
    return _size(tensor) * tensor.dtype.size if counted else 0


def _kernels(op):
    """Returns how many kernels a node that computes on the GPU starts."""
    if op.type == "Transpose":
        return int(not _is_view(op))
    if re.match(r"Conv[23]D", op.type):
        return 1 if is_product(op) else 2  # cuDNN's weights are reordered first.
    if op.type in _SUMS and op.outputs[0].dtype.is_floating:
        return 1 + _is_in_two_steps(op)
    return _SEVERAL.get(op.type, 1)


def is_product(convolution):
    """Whether TensorFlow computes it as one product, without cuDNN."""
    by_filter = "BackpropFilter" in convolution.type
    kernel = convolution.outputs[0] if by_filter else convolution.inputs[1]
    sizes = [*kernel.shape[:-2], *convolution.get_attr("strides")]
    last = convolution.get_attr("data_format") in (b"NHWC", b"NDHWC")
    return last and all(size == 1 for size in sizes)


def _is_in_two_steps(reduction):
    """Whether it sums parts first: long ones, but not along the last axis alone."""
    results = max(1, _size(reduction.outputs[0]))
    axes = tf.get_static_value(reduction.inputs[1])
    rank = reduction.inputs[0].shape.rank or 0
    in_rows = axes is not None and {-1, rank - 1} & {*map(int, axes.flat)}
    long = _size(reduction.inputs[0]) // results > _LONG_SUM
    return long and (results == 1 or not in_rows)


def _is_view(transpose):
    """Whether a transposition only moves axes of one element."""
    order = tf.get_static_value(transpose.inputs[1])
    shape = transpose.inputs[0].shape
    if order is None or shape.rank is None:
        return False
    long = [axis for axis in order if shape[axis] != 1]
    return long == sorted(long)
