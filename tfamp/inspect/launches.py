"""How many kernels a training step launches on a GPU, counted in its graph.

TensorFlow's graph optimizer is run for the GPU, which need not be there. What it leaves
of the graph is what the executor starts, node by node: a kernel or two each, or nothing
(`_kernels`). TensorFlow registers its GPU kernels on machines without a GPU, too, and
a registration tells what a kernel wants in the host's memory.
"""

import collections
import math
import re
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.facts import hardware, names

PARTS = ("forward", "backward", "update")
_PART = re.compile(r"(?:^|/)(forward|gradient_tape|backward|update)(?:_\d+)?/")
_LOOPS = ("Enter", "Exit", "LoopCond", "Merge", "NextIteration", "Switch")
# What starts nothing: views of memory, handles, lists of tensors, control flow.
_FREE = frozenset(
    "AssignVariableOp Bitcast Const EmptyTensorList EnsureShape ExpandDims Identity "
    "IdentityN NoOp Placeholder PreventGradient ReadVariableOp Reshape Shape ShapeN "
    "Snapshot Squeeze StopGradient TensorListGetItem TensorListPopBack "
    "TensorListPushBack TensorListReserve TensorListSetItem VarHandleOp".split()
)
# Kernels of a node, where they are not one. A convolution reorders its weights first.
_SEVERAL = {
    **dict.fromkeys(("Conv2D", "Conv3D"), 2),
    **dict.fromkeys(("Conv2DBackpropFilter", "Conv3DBackpropFilterV2"), 2),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2"), 2),
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
_GRAPPLER = "tensorflow.python.grappler"
_KERNELS = "tensorflow.python.framework.kernels:get_registered_kernels_for_op"
_HANDLE_DATA = "tensorflow.python.ops.handle_data_util:get_resource_handle_data"
_PROTOS = "tensorflow.core.protobuf"


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
      graph: The graph of a function, with its parts in the name scopes of `PARTS`.
      device: A GPU.

    Raises:
      ImportError: If this release of TensorFlow lacks a name that this needs.
    """
    return _Counted(_optimized(graph, device)).launches()


def count_compiled(graph: tf.Graph) -> Launches:
    """Counts the launches of a step that XLA compiles: one graph of kernels.

    A convolution is a call of cuDNN, which stays outside: the graph ends before it, and
    another one begins after it.
    """
    nodes = _all_nodes(graph.as_graph_def())
    calls = sum(bool(_CONVOLUTIONS.match(node.op)) for node in nodes)
    return Launches({"step": 2 * calls + 1}, 0, 0, calls + 1, None)


def refused_by_xla(graph: tf.Graph) -> list[str]:
    """Returns the kinds of operators that XLA does not compile for a GPU."""
    # XLA registers its operators when it first compiles.
    tf.function(lambda x: x + 1, jit_compile=True, autograph=False)(tf.ones(()))
    registered = _resolved(_KERNELS)
    kinds = {node.op for node in _all_nodes(graph.as_graph_def())}
    kinds -= {"Placeholder", "NoOp", "Const"}
    known = {kind: {k.device_type for k in registered(kind).kernel} for kind in kinds}
    # A graph's own functions have no kernels.
    return sorted(k for k, on in known.items() if on and "XLA_GPU_JIT" not in on)


def _resolved(name):
    found = names.resolve(name)
    if found is None:
        raise ImportError(f"this release of TensorFlow has no {name}")
    return found


def _all_nodes(definition):
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def


# ---- The graph as TensorFlow runs it ----


def _optimized(graph, device):
    """Returns the graph of a function as Grappler leaves it for one GPU."""
    definition = graph.as_graph_def()
    inputs = {x.op.name: x for x in graph.inputs if x.dtype == tf.resource}
    for node in definition.node:  # The layout of convolutions is the GPU's.
        node.device = "/job:localhost/replica:0/task:0/device:GPU:0"
        if node.name in inputs:
            _tell_shape(node, inputs[node.name])
    meta = tf.compat.v1.train.export_meta_graph(graph_def=definition, graph=graph)
    meta.ClearField("collection_def")  # Variables, whose initializers are elsewhere.
    fetches = meta.collection_def["train_op"].node_list.value
    fetches.extend(tensor.name for tensor in graph.outputs)
    fetches.extend(operation.name for operation in graph.control_outputs)
    config = tf.compat.v1.ConfigProto()
    config.CopyFrom(_resolved("tensorflow.python.eager.context:context")().config)
    config.graph_options.rewrite_options.min_graph_nodes = -1  # However small it is.
    optimize = _resolved(f"{_GRAPPLER}.tf_optimizer:OptimizeGraph")
    cluster = _resolved(f"{_GRAPPLER}.cluster:Cluster")
    machine = cluster(devices=[_named("CPU"), _named("GPU", device)])
    return optimize(config, meta, cluster=machine)


def _tell_shape(node, handle):
    """Has a handle that a function is given tell the shape of its variable."""
    found = _resolved(_HANDLE_DATA)(handle)
    if found is not None and found.is_set:
        variable = found.shape_and_type[0]
        node.op = "VarHandleOp"
        node.attr.clear()
        node.attr["dtype"].type = variable.dtype
        node.attr["shape"].shape.CopyFrom(variable.shape)
        node.attr["shared_name"].s = node.name.encode()


def _named(kind, device=None):
    made = _resolved(f"{_PROTOS}.device_properties_pb2:NamedDevice")()
    made.name = f"/job:localhost/replica:0/task:0/device:{kind}:0"
    made.properties.type, made.properties.num_cores = kind, 16
    made.properties.frequency = 2000
    if device is not None:
        capability = device.compute_capability or (0, 0)
        made.properties.environment["architecture"] = ".".join(map(str, capability))
    return made


class _Counted:
    """An optimized graph, and where its nodes run."""

    def __init__(self, definition):
        self.nodes = {node.name: node for node in definition.node}
        self.library = {f.signature.name: f for f in definition.library.function}
        with tf.Graph().as_default() as self.graph:  # It infers shapes.
            tf.import_graph_def(definition, name="")
        self.registered = _resolved(_KERNELS)
        self.kernels: dict[Any, Any] = {}
        self.turns = _Loops(self.graph).turns

    def launches(self) -> Launches:
        parts, found = dict.fromkeys(PARTS, 0), collections.Counter()
        for op in self.graph.get_operations():
            turns = self.turns(op)
            number, is_graph = self._launched(op)
            parts[_part_of(op.name)] += turns * number
            found["casts"] += turns * number * (op.type == "Cast")
            found["graphs"] += turns * is_graph
            if number:
                found["moved"] += turns * sum(map(_bytes, [*op.inputs, *op.outputs]))
            found["copies"] += turns * len(self._copied(op))
        return Launches(parts, *(found[x] for x in Launches._fields[1:]))

    def _launched(self, op):
        """Returns how many launches a node is, and whether it is a CUDA graph."""
        if (called := self._called(op)) is not None:
            kernels = self._kernels_of(called)
            is_graph = kernels >= _LEAST_GRAPH
            return (1 if is_graph else kernels), is_graph
        if op.type in _FREE or op.type in _LOOPS or self._is_on_host(op):
            return 0, False
        return _kernels(op), False

    def _called(self, op):
        """Returns the function that a node has XLA run; None for other nodes."""
        if not op.type.endswith("PartitionedCall"):
            return None
        return self.library[self.nodes[op.name].attr["f"].func.name]

    def _kernels_of(self, function):
        """Estimates what XLA makes of a function.

        One kernel of each product and each sum, and one of each result: it fuses the
        elementwise operators before them.
        """
        number = 0
        for node in function.node_def:
            if node.op in _PRODUCTS or node.op in _SUMS:
                number += 1
            elif "AssignVariableOp" in node.op or "AssignAddVariableOp" in node.op:
                number += 1
            elif node.op.endswith("PartitionedCall"):
                number += self._kernels_of(self.library[node.attr["f"].func.name])
        return max(number, 1)

    # ---- Memory of the host ----

    def _kernel(self, op):
        """Returns the GPU kernel of a node: what of it is in the host's memory.

        None without a kernel: the node runs on the host.
        """
        node = self.nodes[op.name]
        types = {}
        for attribute in op.op_def.attr:
            if attribute.type == "type":
                types[attribute.name] = {node.attr[attribute.name].type}
            elif attribute.type == "list(type)":
                types[attribute.name] = {*node.attr[attribute.name].list.type}
        key = op.type, *(frozenset(x) for x in types.values())
        if key not in self.kernels:
            fitting = {
                kernel.device_type: kernel
                for kernel in self.registered(op.type).kernel
                if all(
                    types.get(c.name, set()) <= {*c.allowed_values.list.type}
                    for c in kernel.constraint
                )
            }
            self.kernels[key] = fitting.get("GPU", fitting.get("DEFAULT"))
        return self.kernels[key]

    def _is_on_host(self, op):
        """Whether a node runs on the host, or computes in its memory."""
        if (kernel := self._kernel(op)) is None:
            return True
        results = set(_flat(op.op_def.output_arg, self.nodes[op.name]))
        return bool(results) and results <= {*kernel.host_memory_arg}

    def _copied(self, op):
        """Returns the tensors that a node is the first to take to the host."""
        if op.type in _FREE or self._called(op) is not None:
            return []
        kernel = self._kernel(op)
        wanted = None if kernel is None else {*kernel.host_memory_arg}
        arguments = _flat(op.op_def.input_arg, self.nodes[op.name])
        return [
            x
            for x, name in zip(op.inputs, arguments, strict=True)
            if (wanted is None or name in wanted)
            and self._is_on_device(x)
            and x.consumers()[0] is op
        ]

    def _is_on_device(self, tensor):
        op = tensor.op
        if op.type == "Placeholder" or tensor.dtype in (tf.resource, tf.variant):
            return False
        if self._called(op) is not None:
            return True
        kernel = self._kernel(op)
        results = list(_flat(op.op_def.output_arg, self.nodes[op.name]))
        place = results[tensor.value_index]
        return kernel is not None and place not in kernel.host_memory_arg


def _part_of(name):
    found = _PART.search(name)
    part = found[1] if found else "forward"
    return "backward" if part == "gradient_tape" else part


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
    if op.type in _SUMS and op.outputs[0].dtype.is_floating:
        return 1 + _is_in_two_steps(op)
    return _SEVERAL.get(op.type, 1)


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


class _Loops:
    """The loops of a graph, and how often each runs.

    One whose length the graph does not tell counts as one turn.
    """

    def __init__(self, graph):
        # Loops that an operation is in, outermost first, and those of its results.
        self.inside: dict[tf.Operation, tuple[str, ...]] = {}
        self.after: dict[tf.Operation, tuple[str, ...]] = {}
        for op in graph.get_operations():  # Sorted, but for what ends a turn.
            before = [x.op for x in op.inputs] + [*op.control_inputs]
            loops = max((self.after.get(x, ()) for x in before), key=len, default=())
            self.inside[op] = self.after[op] = loops
            if op.type == "Enter":
                self.after[op] = (*loops, op.get_attr("frame_name"))
            elif op.type == "Exit":
                self.after[op] = loops[:-1]
        ends = [op for op in self.inside if op.type == "LoopCond"]
        self.lengths = {self.inside[op][-1:]: op.inputs[0] for op in ends}

    def turns(self, op: tf.Operation) -> int:
        """Returns how often an operation runs in a step."""
        return math.prod(self._length(loop) for loop in self.inside[op])

    def _length(self, loop):
        length = self.lengths.get((loop,), 1)
        if not isinstance(length, int):
            self.lengths[(loop,)] = 1  # Of a loop that waits for itself.
            self.lengths[(loop,)] = length = self._least(length) or 1
        return length

    def _least(self, condition):
        """Returns the least bound of a counter that a condition compares; else None."""
        op = condition.op
        if op.type == "LogicalAnd":
            found = [self._least(x) for x in op.inputs]
            return min((x for x in found if x is not None), default=None)
        return self._number(op.inputs[1]) if op.type == "Less" else None

    def _number(self, tensor):
        op = tensor.op
        if op.type == "Exit":  # The counter of another loop: of the forward pass.
            return self._length(self.inside[op][-1])
        if op.type in ("Enter", "Identity"):
            return self._number(op.inputs[0])
        value = tf.get_static_value(tensor)
        return int(value) if value is not None and value.size == 1 else None
