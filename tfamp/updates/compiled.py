"""An optimizer's update as one program that XLA compiles.

Keras runs some 27 operators for each variable. On a GPU each is a launch (20 to 26 us
with an H200, results/gpu/report.md): of 8,082 in a step of BERT-Base 5,437 were the
update's.
One compiled program is one CUDA graph, and one pass over memory.

| traced for | update | why |
|---|---|---|
| one GPU, a graph without XLA | one compiled program | 1 launch, for 27 a variable |
| one CPU, a graph without XLA | Adam's in one kernel (`adam`) | time |
| XLA | as it is | it is compiled with the step |
| else | as it is | `reason_against` says why |

A gradient that is only widened for its variable is given to the program in 16 bits.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfamp.facts import graph_context
from tfamp.keras_patches import hooks, keras_optimizers, replicas
from tfamp.updates import adam, sizes

_LOW = (tf.float16, tf.bfloat16)


def reason_against(optimizer, variables: Sequence, any_kind: bool = False) -> str:
    """Returns why XLA should not compile an update that is traced now; else "".

    Args:
      optimizer: A built Keras optimizer.
      variables: What it updates.
      any_kind: Whether it may be another than Keras' own, which XLA is known to
        compile.
    """
    foreign = keras_optimizers.foreign_part(optimizer, variables)
    written = [*variables, *optimizer.variables]
    natives = keras_optimizers.native(written)
    if not tf.inside_function():
        return "it runs eagerly"
    if tf.distribute.has_strategy():
        return "a strategy distributes it"
    if graph_context.watched():
        return "operations are watched, as by tf.debugging.enable_check_numerics"
    if graph_context.deterministic():
        return "op determinism is on, and not every kernel of XLA is deterministic"
    if foreign and not any_kind:
        return f"{type(foreign).__name__} is not one of Keras' own"
    # XLA flushes subnormals, and an epsilon of 1e-7 is one in float16.
    low = [v for v in written if v.dtype == "float16"]
    if low and not any_kind:
        return f"{low[0].path} is float16, in which epsilon is a subnormal"
    if not graph_context.xla_supports({v.device for v in natives}):
        return "its variables are on several devices"
    return ""


def call(function: Callable[[list], Any], grads: Sequence, variables: Sequence) -> Any:
    """Calls a function of gradients as one compiled program, in a graph without XLA.

    Args:
      function: It takes a list of gradients, and returns nothing or tensors.
      grads: Tensors, `tf.IndexedSlices` or None.
      variables: Their variables.

    Returns:
      What the function returns.
    """
    pairs = zip(grads, variables, strict=True)
    arguments = [None if grad is None else _argument(grad, v) for grad, v in pairs]

    @tf.function(autograph=False, jit_compile=True)
    def update(arguments):
        pairs = zip(arguments, grads, strict=True)
        return function([None if x is None else _wide(x, like) for x, like in pairs])

    (first,) = keras_optimizers.native(variables[:1])
    with tf.device(first.device):  # It need not be that of the step.
        return update(arguments)


def _argument(grad, variable):
    """Returns a gradient in 16 bits if it was only widened, and of a known size."""
    if isinstance(grad, tf.IndexedSlices):
        values, indices = _narrow(grad.values), grad.indices
        if not values.shape.is_fully_defined():
            # Rows of zeros, of the first index, change nothing.
            values, indices = sizes.padded(values), sizes.padded(indices)
        return values, indices
    if not grad.shape.is_fully_defined():
        grad = tf.ensure_shape(grad, variable.shape)
    return _narrow(grad)


def _narrow(x):
    widened = tf.is_symbolic_tensor(x) and x.op.type == "Cast"
    return x.op.inputs[0] if widened and x.op.inputs[0].dtype in _LOW else x


def _wide(x, like):
    """Returns what `_argument` made of a gradient in the format that it had."""
    if not isinstance(like, tf.IndexedSlices):
        return tf.cast(x, like.dtype)
    return tf.IndexedSlices(tf.cast(x[0], like.dtype), x[1], like.dense_shape)


def accumulating(optimizer, holds: Any = True):
    """While an update is traced, a window of gradients is summed, then applied, apart.

    Each micro-batch adds its gradients in one program; the last one of a window takes
    another one. In one branch, XLA would copy every slot.

    Args:
      optimizer: A Keras optimizer, built.
      holds: Bool tensor []. Whether the micro-batch counts.
    """

    name, apply = "_backend_apply_gradients", replicas.accumulate  # Keras 3.15
    return hooks.replaced(
        [
            (member, name, functools.partial(apply, member, run=call, holds=holds))
            for member in keras_optimizers.member_optimizers(optimizer)
            if member.gradient_accumulation_steps
        ]
    )


@hooks.around
@tf.autograph.experimental.do_not_convert
def _apply(original, optimizer, grads, trainable_variables=None):
    """Of optimizers that scale no loss; `gate` has those that do."""
    kind = graph_context.one_device()
    is_inner = "_backend_apply_gradients" in vars(optimizer)
    if graph_context.in_xla() or not tf.inside_function() or is_inner:
        return original(optimizer, grads, trainable_variables)
    if kind == "CPU" and not graph_context.watched():
        with adam.in_one_kernel(optimizer):
            return original(optimizer, grads, trainable_variables)
    grads, variables = keras_optimizers.pairs(optimizer, grads, trainable_variables)
    if not grads or not wanted(optimizer, variables):
        return original(optimizer, grads, variables)
    if optimizer.gradient_accumulation_steps:
        with accumulating(optimizer):
            return original(optimizer, grads, variables)
    call(lambda grads: original(optimizer, grads, variables), grads, variables)
    return None


def wanted(optimizer, variables: Sequence) -> bool:
    """Whether an update is to be compiled: on a GPU, while `enable` has it so."""
    on_gpu = HOOKS.in_force() and graph_context.one_device() == "GPU"
    if not on_gpu or graph_context.is_for_a_rest():
        return False
    HOOKS.last_reason = reason_against(optimizer, variables)
    return not HOOKS.last_reason


class _Hooks(hooks.HookGroup):
    # Why the last update on a GPU was not compiled; empty if it was.
    last_reason = ""

    def install(self) -> None:
        super().install()
        self.last_reason = ""


HOOKS = _Hooks(compiled_apply=_apply)
