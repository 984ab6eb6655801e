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

import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfamp.facts import graph_context
from tfamp.keras_patches import hooks
from tfamp.kernels import programs

_LEAST = 2  # Launches that a program must save to be worth its own.


_now = threading.local()  # Its `graph` is that of the step which is traced.


def gathers(x: tf.Tensor) -> bool:
    """Whether small operators of a tensor that are traced now become programs."""
    in_step = tf.compat.v1.get_default_graph() is getattr(_now, "graph", None)
    return in_step and x.shape.is_fully_defined()


@hooks.around
def of_step(original, model, *args, **kwargs):
    """For a `train_step`, or one like it, whose small operators become programs."""
    step = original.__get__(model, type(model))
    if tf.executing_eagerly() or not _applies(args):
        return step(*args, **kwargs)
    graph = tf.compat.v1.get_default_graph()
    first = len(graph.get_operations())
    with hooks.replaced([(_now, "graph", graph)]):
        outputs = step(*args, **kwargs)
    return gather(graph.get_operations()[first:], outputs)


def _applies(args):
    flat = tf.nest.flatten(args, expand_composites=True)
    static = all(x.shape.is_fully_defined() for x in flat if isinstance(x, tf.Tensor))
    return (
        static  # XLA compiles each size anew.
        and graph_context.one_device() == "GPU"
        and not graph_context.in_xla()
        and not graph_context.watched()
        and not graph_context.is_for_a_rest()
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
        if sum(not programs.is_view(op) for op in members) >= _LEAST:
            programs.replace(members, returned, compiled, new)
    return tf.nest.pack_sequence_as(outputs, [new.get(id(x), x) for x in flat])


def _programs(operations) -> dict[int, list]:
    """Returns the operators of each program, by its number."""
    number, now = {}, 0  # That of an operator, and whether it is small.
    order, early = _Order(), set()
    for op in operations:
        small = programs.is_small(op)
        # A constant is in each program, whatever it was ordered behind.
        inputs = [x for x in op.inputs if not small or programs.constant(x) is None]
        before = [*(x.op for x in inputs), *op.control_inputs, *order.before(op)]
        prior = [number[x] for x in before if x in number]
        least = max((n + (small and not is_small) for n, is_small in prior), default=0)
        if small and not programs.is_view(op):
            if _is_early(op, early):
                early.add(op)
            else:
                now = least = max(now, least)
        number[op] = least, small
    for op in reversed(operations):
        # A cast of a bias, too, which costs nothing where it is added.
        if number[op][1] and (op not in early or op.type == "Cast"):
            number[op] = _latest(op, number), True
    groups = {}
    for op in operations:
        if number[op][1]:
            groups.setdefault(number[op][0], []).append(op)
    return groups


def _latest(op, number):
    """Returns the program of its first consumer, if it takes no more memory till then.

    So the bits of dropout, which are made of its key, are not kept for a product.
    """
    consumers = [number.get(c, (0, False)) for x in op.outputs for c in x.consumers()]
    # A variable stays anyway.
    held = [x for x in op.inputs if x.op.type != "ReadVariableOp"]
    before, after = (_bytes(x) for x in (held, op.outputs))
    waits = consumers and all(small for _, small in consumers) and before <= after
    return min(n for n, _ in consumers) if waits else number[op][0]


def _bytes(tensors):
    sizes = [x for x in tensors if programs.constant(x) is None]
    return sum(x.shape.num_elements() * x.dtype.size for x in sizes)


def _is_early(op, early):
    """Whether it is done for all layers at once: casts of weights, keys of dropout.

    These are made of variables alone; what is large, but for weights, waits.
    """
    sources = [x.op for x in op.inputs if programs.constant(x) is None]
    reads = [source.type == "ReadVariableOp" for source in sources]
    if op.type == "Cast" and all(reads):
        return True
    tiny = all(x.shape.num_elements() <= programs.SHAPE for x in op.outputs)
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
        predecessors = [self._written[h] for h in handles if h in self._written]
        if not reads:
            for handle in handles:
                predecessors += self._used.pop(handle, [])
                self._written[handle] = op
            predecessors += [self._last] * (self._last is not None)
            self._last = op
        for handle in handles:
            self._used.setdefault(handle, []).append(op)
        return predecessors


class _Hooks(hooks.HookGroup):
    def gather(self) -> bool:
        """Whether steps that are traced now have programs, if sizes are known."""
        return bool(self._hooks) and graph_context.one_device() == "GPU"

    def add(self, kind: type) -> None:
        """Hooks the steps of a model's class, where they are others than Keras'."""
        for patch in self.patches if self.gather() else ():
            self.add_to(kind, patch.name, of_step, patch)


HOOKS = _Hooks(train_step=of_step, test_step=of_step, predict_step=of_step)
