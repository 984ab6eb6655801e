"""Small operators of a graph, and several of them as one program that XLA compiles."""

import contextlib
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfamp.facts import names

# Operators of XLA's loops and reductions.
_SMALL = set(
    """
    Abs Add AddN AddV2 All Any BiasAdd BiasAddGrad BroadcastTo Cast ClipByValue ConcatV2
    Cos Div DivNoNan Elu EluGrad Equal Erf Erfc Exp ExpandDims Expm1 Fill Floor
    FloorDiv FloorMod Greater GreaterEqual Identity IdentityN Inv InvGrad IsFinite IsInf
    IsNan LeakyRelu LeakyReluGrad Less LessEqual Log Log1p LogSoftmax LogicalAnd
    LogicalNot LogicalOr Max Maximum Mean Min Minimum Mul MulNoNan Neg NotEqual OnesLike
    Pack Pad Pow PreventGradient Prod Range RealDiv Reciprocal ReciprocalGrad Relu Relu6
    Relu6Grad ReluGrad Reshape Round Rsqrt RsqrtGrad Select SelectV2 Selu SeluGrad
    Sigmoid SigmoidGrad Sign Sin Slice Softmax Softplus SoftplusGrad Softsign
    SoftsignGrad Sqrt SqrtGrad Square SquaredDifference Squeeze StopGradient
    StridedSlice Sub Sum Tan Tanh TanhGrad Tile Transpose Unpack Xdivy Xlogy ZerosLike
    LeftShift RightShift BitwiseAnd BitwiseOr BitwiseXor Bitcast
    """.split()
)
# Of these: other views of the same memory.
_VIEWS = set(
    """
    ExpandDims Identity IdentityN PreventGradient Reshape Squeeze StopGradient
    """.split()
)
# By the kind of operator, the inputs that XLA must know when it compiles.
_KNOWN_INPUTS = {"ConcatV2": slice(-1, None), "Fill": slice(1), "Range": slice(None)}
_KNOWN_INPUTS |= dict.fromkeys(
    """
    All Any BroadcastTo ExpandDims Max Mean Min Pad Prod Reshape Slice StridedSlice Sum
    Tile Transpose
    """.split(),
    slice(1, None),
)
_KNOWN = "tensorflow.python.framework.smart_cond:smart_constant_value"
SHAPE = 16  # Integers of a shape are fewer.


def is_small(op: tf.Operation) -> bool:
    """Whether an operator may be part of a program: see the list above."""
    # Between small ones, as in TensorFlow's gradients, they only order the memory.
    beside = {x.type for x in (*op.control_inputs, *op._control_outputs)}
    if op.type not in _SMALL or beside - _SMALL - {"Const"}:
        return False
    must = op.inputs[_KNOWN_INPUTS.get(op.type, slice(0))]
    if any(constant(x) is None for x in must):
        return False
    values = [x for x in op.inputs if constant(x) is None]
    device = tf.DeviceSpec.from_string(op.device).device_type
    return device in (None, "GPU") and all(map(_is_value, (*values, *op.outputs)))


def _is_value(x):
    """Whether a tensor is of a known size, and on the GPU.

    TensorFlow computes shapes in the host's memory, and so it has int32 of all sizes:
    token ids go there and back.
    """
    others = tf.resource, tf.string, tf.variant
    is_fixed = x.shape.is_fully_defined() and x.dtype not in others
    return is_fixed and not _is_shape(x)


def _is_shape(x):
    static_int32 = x.dtype == tf.int32 and x.shape.is_fully_defined()
    return static_int32 and x.shape.num_elements() <= SHAPE


def constant(x: tf.Tensor) -> np.ndarray | None:
    """Returns the value of a constant or a known shape; None of any other tensor."""
    if x.op.type == "Const":
        return tf.get_static_value(x)
    if not _is_shape(x):
        return None
    # Also of what is computed from shapes.
    value = names.resolve(_KNOWN, tf.get_static_value)(x)
    return None if value is None else np.asarray(value, x.dtype.as_numpy_dtype)


def is_view(op: tf.Operation) -> bool:
    """Whether it launches nothing; int32 would be copied to the host for it."""
    return op.type in _VIEWS and all(x.dtype != tf.int32 for x in op.outputs)


def replace(
    operations: Sequence[tf.Operation],
    returned: set[int],
    compiled: dict[tuple, Callable],
    new: dict,
) -> None:
    """Has others take what a program computes in place of its operators' results.

    Args:
      operations: Operators that become one, in the order of their creation.
      returned: ids of tensors that are taken, too, as by operators.
      compiled: The functions of the step so far, to which its own is added.
      new: {id of a tensor: the tensor in its place}, to which its own are added.
    """
    operations, views, inputs, outputs = _parts(operations, returned)
    if not outputs:
        return
    definition, wanted = _definition(operations, inputs, outputs)
    specs = [tf.TensorSpec(x.shape, x.dtype) for x in inputs]
    key = definition.SerializeToString(deterministic=True), *specs, *wanted
    if key not in compiled:
        compiled[key] = _compile(definition, specs, wanted)
    scope, slash, _ = operations[-1].name.partition("/")
    # Its own, as profilers show it: "gradient_tape" and others.
    with tf.name_scope(f"{scope}/") if slash else contextlib.nullcontext():
        results = compiled[key](*inputs)
    inside = set(operations) - views
    for old, result in zip(outputs, results, strict=True):
        new[id(old)] = result
        for consumer in old.consumers():
            if consumer not in inside:
                for place, x in enumerate(consumer.inputs):
                    if x is old:
                        consumer._update_input(place, result)


def _parts(operations, returned):
    """Returns a program's operators, views, inputs and outputs.

    Views are those of the operators that others take: they stay, beside their copy in
    the program. As a result, XLA would copy what is but another view of the same
    memory. Inputs are the tensors that the operators take from others, outputs those
    that others take.
    """
    used, views = set(operations), set()

    def is_taken(x):
        others = (c for c in x.consumers() if c not in used or c in views)
        return id(x) in returned or any(others)

    for op in reversed(operations):
        if is_view(op) and any(map(is_taken, op.outputs)):
            views.add(op)
            if not any(c in used for x in op.outputs for c in x.consumers()):
                used.remove(op)
    operations = [op for op in operations if op in used]
    taken = [x for op in operations for x in op.inputs]
    inputs = {id(x): x for x in taken if x.op not in used and constant(x) is None}
    results = [x for op in operations if op not in views for x in op.outputs]
    outputs = [x for x in results if is_taken(x)]
    return operations, views, list(inputs.values()), outputs


def _definition(operations, inputs, outputs):
    """Returns a program's graph, whose names tell nothing but the order; its outputs.

    Constants are copied into each program that takes them.
    """
    graph, places = tf.compat.v1.GraphDef(), {}
    graph.versions.CopyFrom(operations[0].graph.graph_def_versions)
    for x in inputs:
        places[id(x)] = f"input{len(places)}"
    for op in operations:
        for x in op.inputs:
            if id(x) not in places:
                node = graph.node.add(name=f"constant{len(graph.node)}", op="Const")
                value = tf.make_tensor_proto(constant(x), x.dtype)
                node.attr["dtype"].type = x.dtype.as_datatype_enum
                node.attr["value"].tensor.CopyFrom(value)
                places[id(x)] = f"{node.name}:0"
        node, name = graph.node.add(), f"op{len(graph.node)}"
        node.CopyFrom(op.node_def)
        node.name, node.device = name, ""
        node.input[:] = [places[id(x)] for x in op.inputs]
        for attribute in [a for a in node.attr if a.startswith("_")]:
            del node.attr[attribute]
        places.update({id(x): f"{name}:{x.value_index}" for x in op.outputs})
    return graph, [places[id(x)] for x in outputs]


def _compile(definition, specs, results):
    @tf.function(autograph=False, jit_compile=True, input_signature=specs)
    def small_operators(*inputs):
        input_map = {f"input{i}": x for i, x in enumerate(inputs)}
        return tf.graph_util.import_graph_def(definition, input_map, results, name="")

    return small_operators
