"""The graph of a function as TensorFlow runs it on a GPU, which need not be there."""

import math
from typing import Any

import tensorflow as tf

from tfamp.facts import hardware, names
from tfamp.inspect import traces

_GRAPPLER = "tensorflow.python.grappler"
_HANDLE_DATA = "tensorflow.python.ops.handle_data_util:get_resource_handle_data"
_NAMED = "tensorflow.core.protobuf.device_properties_pb2:NamedDevice"
_DEVICE = "/job:localhost/replica:0/task:0/device:{}:0"


def resolved(name: str) -> Any:
    """Returns what a private name of TensorFlow stands for.

    Raises:
      ImportError: If this release does not have it.
    """
    target = names.resolve(name)
    if target is None:
        raise ImportError(f"this release of TensorFlow has no {name}")
    return target


def optimized(graph: tf.Graph, device: hardware.DeviceDescription) -> Any:
    """Returns the graph of a function as TensorFlow's graph optimizer leaves it.

    Args:
      graph: The graph.
      device: A GPU, on which all of it runs.
    """
    definition = graph.as_graph_def()
    inputs = {x.op.name: x for x in graph.inputs if x.dtype == tf.resource}
    for node in definition.node:  # The layout of convolutions is the GPU's.
        node.device = _DEVICE.format("GPU")
        if node.name in inputs:
            _tell_shape(node, inputs[node.name])
    meta = traces.meta_graph(graph, definition)
    config = tf.compat.v1.ConfigProto()
    config.CopyFrom(resolved("tensorflow.python.eager.context:context")().config)
    config.graph_options.rewrite_options.min_graph_nodes = -1  # However small it is.
    optimize = resolved(f"{_GRAPPLER}.tf_optimizer:OptimizeGraph")
    cluster = resolved(f"{_GRAPPLER}.cluster:Cluster")
    devices = [_named("CPU"), _named("GPU", device)]
    return optimize(config, meta, cluster=cluster(devices=devices))


def _tell_shape(node, handle):
    """Has a handle that a function is given tell the shape of its variable."""
    handle_data = resolved(_HANDLE_DATA)(handle)
    if handle_data is not None and handle_data.is_set:
        variable = handle_data.shape_and_type[0]
        node.op = "VarHandleOp"
        node.attr.clear()
        node.attr["dtype"].type = variable.dtype
        node.attr["shape"].shape.CopyFrom(variable.shape)
        node.attr["shared_name"].s = node.name.encode()


def _named(kind, device=None):
    proto = resolved(_NAMED)()
    proto.name = _DEVICE.format(kind)
    proto.properties.type, proto.properties.num_cores = kind, 16
    proto.properties.frequency = 2000
    if device is not None:
        capability = device.compute_capability or (0, 0)
        proto.properties.environment["architecture"] = ".".join(map(str, capability))
    return proto


class Loops:
    """The loops of a graph, and how often each runs.

    One whose length the graph does not tell counts as one turn.
    """

    def __init__(self, graph: tf.Graph):
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
        self.conditions = {
            loops[-1]: op.inputs[0]
            for op, loops in self.inside.items()
            if op.type == "LoopCond" and loops
        }

    def turns(self, op: tf.Operation) -> int:
        """Returns how often an operation runs in a step."""
        return math.prod(self._length(loop) for loop in self.inside[op])

    def _length(self, loop):
        condition = self.conditions.get(loop)
        return (condition is not None and self._least(condition)) or 1

    def _least(self, condition):
        """Returns the least bound of a counter that a condition compares; else None."""
        op = condition.op
        if op.type == "LogicalAnd":
            bounds = [self._least(x) for x in op.inputs]
            return min((x for x in bounds if x is not None), default=None)
        return self._number(op.inputs[1]) if op.type == "Less" else None

    def _number(self, tensor):
        op = tensor.op
        if op.type == "Exit":  # The counter of another loop: of the forward pass.
            return self._length(self.inside[op][-1])
        if op.type in ("Enter", "Identity") or _is_carried(op):
            return self._number(op.inputs[0])
        value = tf.get_static_value(tensor)
        return int(value) if value is not None and value.size == 1 else None


def _is_carried(op):
    """Whether a loop passes a value from turn to turn as it is."""
    if op.type != "Merge" or op.inputs[1].op.type != "NextIteration":
        return False
    switch = op.inputs[1].op.inputs[0].op
    return switch.type == "Switch" and switch.inputs[0].op is op
