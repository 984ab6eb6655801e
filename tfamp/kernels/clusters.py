"""The small operators of a training step in few programs, for a GPU without XLA.

There each operator is a launch. Products, convolutions and whatever else has a good
kernel of its own stay; what is elementwise, a reduction or a change of layout between
two of them becomes one program that XLA compiles. It is done once a step is traced,
so for the user's own layers, losses and metrics, too, forward and backward:

```
program(op) = max(program of the operators created before,
                  program(input)      if the input is small, too
                  program(input) + 1  if it is not)
```

so that no program needs what needs its own results, and nothing of the backward pass is
computed before it. Programs of equal operators, as of equal layers, are compiled once.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfamp.facts import graph_context, names
from tfamp.keras_patches import hooks

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
    StridedSlice
    Sub Sum Tan Tanh TanhGrad Tile Transpose Unpack Xdivy Xlogy ZerosLike
    LeftShift RightShift BitwiseAnd BitwiseOr BitwiseXor Bitcast
    """.split()
)
# Of these: other views of the same memory.
_VIEWS = set(
    """
    ExpandDims Identity IdentityN PreventGradient Reshape Squeeze StopGradient
    """.split()
)
_LEAST = 2  # Launches that a program must save to be worth its own.
_KNOWN = "tensorflow.python.framework.smart_cond:smart_constant_value"
_SHAPE = 16  # Integers of a shape are fewer.


class _Now(threading.local):
    graph: Any = None  # That of the step which is traced.


_now = _Now()


def gathers() -> bool:
    """Whether the operators that are traced now become programs."""
    here = tf.compat.v1.get_default_graph()
    return _now.graph is not None and here is _now.graph


@contextlib.contextmanager
def _tracing(graph) -> Iterator[None]:
    before, _now.graph = _now.graph, graph
    try:
        yield
    finally:
        _now.graph = before


def of_step(original):
    """Returns a `train_step` whose small operators become programs."""

    def train_step(model, *args, **kwargs):
        step = original.__get__(model, type(model))
        if tf.executing_eagerly() or not _applies(args):
            return step(*args, **kwargs)
        graph = tf.compat.v1.get_default_graph()
        first = len(graph.get_operations())
        with _tracing(graph):
            outputs = step(*args, **kwargs)
        return gather(graph.get_operations()[first:], outputs)

    return train_step


def _applies(args):
    flat = tf.nest.flatten(args, expand_composites=True)
    known = all(x.shape.is_fully_defined() for x in flat if isinstance(x, tf.Tensor))
    return (
        known  # XLA compiles each size anew.
        and graph_context.one_device() == "GPU"
        and not graph_context.in_xla()
        and not graph_context.watched()
        and not graph_context.deterministic()
    )


def gather(operations: Sequence[tf.Operation], outputs: Any) -> Any:
    """Puts the small ones of these operators into programs.

    Args:
      operations: All operators of a step in the order of their creation.
      outputs: A structure of tensors that the step returns.

    Returns:
      The structure, with what the programs compute.
    """
    compiled, new = {}, {}
    flat = tf.nest.flatten(outputs)
    returned = {id(x) for x in flat if isinstance(x, tf.Tensor)}
    for members in _programs(operations).values():
        if sum(not _is_view(op) for op in members) >= _LEAST:
            _replace(_Program.of(members, returned), compiled, new)
    flat = [new.get(id(x), x) for x in flat]
    return tf.nest.pack_sequence_as(outputs, flat)


def _programs(operations) -> dict[int, list]:
    """Returns the operators of each program, by its number."""
    number, now = {}, 0  # That of an operator, and whether it is small.
    order, early = _Order(), set()
    for op in operations:
        before = [*(x.op for x in op.inputs), *op.control_inputs, *order.before(op)]
        small = _is_small(op)
        known = [number[x] for x in before if x in number]
        least = max((n + (small and not is_small) for n, is_small in known), default=0)
        if small and not _is_view(op):
            if _is_early(op, early):
                early.add(op)
            else:
                now = least = max(now, least)
        number[op] = least, small
    for op in reversed(operations):
        if number[op][1] and op not in early:
            number[op] = _latest(op, number), True
    found = {}
    for op in operations:
        if number[op][1]:
            found.setdefault(number[op][0], []).append(op)
    return found


def _latest(op, number):
    """Returns the program of its first consumer, if it takes no more memory till then.

    So the bits of dropout, which are made of its key, are not kept for a product.
    """
    consumers = [number.get(c, (0, False)) for x in op.outputs for c in x.consumers()]
    sizes = [
        sum(
            x.shape.num_elements() * x.dtype.size for x in given if _constant(x) is None
        )
        for given in (op.inputs, op.outputs)
    ]
    waits = consumers and all(small for _, small in consumers) and sizes[0] <= sizes[1]
    return min(n for n, _ in consumers) if waits else number[op][0]


def _is_early(op, early):
    """Whether it is done for all layers at once: casts of weights, keys of dropout.

    These are made of variables alone; what is large, but for weights, waits.
    """
    sources = [x.op for x in op.inputs if _constant(x) is None]
    reads = [source.type == "ReadVariableOp" for source in sources]
    if op.type == "Cast" and all(reads):
        return True
    tiny = all(x.shape.num_elements() <= _SHAPE for x in op.outputs)
    pairs = zip(reads, sources, strict=True)
    return tiny and all(read or source in early for read, source in pairs)


class _Order:
    """What must come before an operator though it takes nothing of it.

    As automatic control dependencies have it: whoever uses a variable comes after the
    last one to write it, and a writer after all that used it before.
    """

    def __init__(self):
        self._written, self._used, self._last = {}, {}, None

    def before(self, op) -> list:
        """Returns these; operators must come in the order of their creation."""
        if not op.op_def.is_stateful or op.type in ("VarHandleOp", "Placeholder"):
            return []
        handles = [id(x) for x in op.inputs if x.dtype == tf.resource]
        reads = op.type == "ReadVariableOp"
        found = [self._written[h] for h in handles if h in self._written]
        if not reads:
            for handle in handles:
                found += self._used.pop(handle, [])
                self._written[handle] = op
            found += [self._last] * (self._last is not None)
            self._last = op
        for handle in handles:
            self._used.setdefault(handle, []).append(op)
        return found


def _is_small(op):
    if op.type not in _SMALL or op.control_inputs or op._control_outputs:
        return False
    values = [x for x in op.inputs if _constant(x) is None]
    device = tf.DeviceSpec.from_string(op.device).device_type
    return device in (None, "GPU") and all(map(_is_value, (*values, *op.outputs)))


def _is_value(x):
    """Whether a tensor is of a known size, and on the GPU.

    TensorFlow computes shapes in the host's memory, and so it has int32 of all sizes:
    token ids go there and back.
    """
    if not x.shape.is_fully_defined() or x.dtype in (
        tf.resource,
        tf.string,
        tf.variant,
    ):
        return False
    return x.dtype != tf.int32 or x.shape.num_elements() > _SHAPE


def _constant(x):
    """Returns a small integer tensor that is known when it is traced; else None.

    Or any other that is a constant.
    """
    if x.op.type == "Const":
        return tf.get_static_value(x)
    small = x.dtype == tf.int32 and x.shape.is_fully_defined()
    if not small or x.shape.num_elements() > _SHAPE:
        return None
    # Also of what is computed from shapes.
    known = names.resolve(_KNOWN, tf.get_static_value)(x)
    return None if known is None else np.asarray(known, x.dtype.as_numpy_dtype)


def _is_view(op):
    """Whether it launches nothing; int32 would be copied to the host for it."""
    return op.type in _VIEWS and all(x.dtype != tf.int32 for x in op.outputs)


class _Program(NamedTuple):
    """Operators that become one.

    Attributes:
      operations: In the order of their creation.
      views: Those of them that others take: they stay, beside their copy in here. As
        a result, XLA would copy what is but another view of the same memory.
      inputs: Tensors that they take from others.
      outputs: Tensors that others take.
    """

    operations: list
    views: set
    inputs: list
    outputs: list

    @classmethod
    def of(cls, operations, returned):
        """Returns that of operators; `returned`: ids of tensors that are taken, too."""
        used, views = set(operations), set()

        def is_taken(x):
            others = (c for c in x.consumers() if c not in used or c in views)
            return id(x) in returned or any(others)

        for op in reversed(operations):
            if _is_view(op) and any(map(is_taken, op.outputs)):
                views.add(op)
                if not any(c in used for x in op.outputs for c in x.consumers()):
                    used.remove(op)
        operations = [op for op in operations if op in used]
        taken = [x for op in operations for x in op.inputs]
        inputs = {id(x): x for x in taken if x.op not in used and _constant(x) is None}
        results = [x for op in operations if op not in views for x in op.outputs]
        outputs = [x for x in results if is_taken(x)]
        return cls(operations, views, list(inputs.values()), outputs)


def _replace(program, compiled, new):
    if not program.outputs:
        return
    definition, results = _definition(program)
    specs = [tf.TensorSpec(x.shape, x.dtype) for x in program.inputs]
    key = definition.SerializeToString(deterministic=True), *specs, *results
    if key not in compiled:
        compiled[key] = _compile(definition, specs, results)
    results = compiled[key](*program.inputs)
    inside = set(program.operations) - program.views
    for old, result in zip(program.outputs, results, strict=True):
        new[id(old)] = result
        for consumer in old.consumers():
            if consumer not in inside:
                for place, x in enumerate(consumer.inputs):
                    if x is old:
                        consumer._update_input(place, result)


def _definition(program):
    """Returns a program's graph, whose names tell nothing but the order; its outputs.

    Constants are copied into each program that takes them.
    """
    graph, places = tf.compat.v1.GraphDef(), {}
    graph.versions.CopyFrom(program.operations[0].graph.graph_def_versions)
    for x in program.inputs:
        places[id(x)] = f"input{len(places)}"

    def constant(x):
        node = graph.node.add(name=f"constant{len(graph.node)}", op="Const")
        node.attr["dtype"].type = x.dtype.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(_constant(x), x.dtype))
        return f"{node.name}:0"

    for op in program.operations:
        for x in op.inputs:
            if id(x) not in places:
                places[id(x)] = constant(x)
        node, name = graph.node.add(), f"op{len(graph.node)}"
        node.CopyFrom(op.node_def)
        node.name, node.device = name, ""
        node.input[:] = [places[id(x)] for x in op.inputs]
        for attribute in [a for a in node.attr if a.startswith("_")]:
            del node.attr[attribute]
        places.update({id(x): f"{name}:{x.value_index}" for x in op.outputs})
    return graph, [places[id(x)] for x in program.outputs]


def _compile(definition, specs, results):
    @tf.function(autograph=False, jit_compile=True, input_signature=specs)
    def small_operators(*inputs):
        given = {f"input{i}": x for i, x in enumerate(inputs)}
        return tf.graph_util.import_graph_def(definition, given, results, name="")

    return small_operators


class _Hooks(hooks.HookGroup):
    def add(self, kind: type) -> None:
        """Hooks the `train_step` of a model's class, if it is another than Keras'."""
        owner = next(base for base in kind.__mro__ if "train_step" in vars(base))
        known = any(hook.owner is owner for _, hook in self._hooks)
        if self._hooks and not known and graph_context.one_device() == "GPU":
            made = hooks.Hook(owner, "train_step", of_step)
            self._hooks.append((self.places[0], made))


HOOKS = _Hooks(train_step=of_step)
