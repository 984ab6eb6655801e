"""Where 16 bits are not enough for an operator, it is computed in float32.

TensorFlow's operators take one format, and not all of them have 16 bits. In a mixed
mode a layer's own code meets both: a `tf.Variable`, a mask or noise has 32 bits beside
its inputs of 16, and `tf.signal` and most of `tf.linalg` compute in float32 alone. Each
is an error in TensorFlow. While `HOOKS` are installed, what failed on 16 bits runs
again with these cast up, and returns float32:

| what failed | what runs again |
| --- | --- |
| a function of `tf` raised a TypeError or ValueError | the outermost that was called |
| an operator in none: of a gradient, of `tf.raw_ops`, an eager one | that operator |
| an operator without a kernel for 16 bits (`kernel_registry`), when it runs | it |

A function runs again as a whole: masks that it makes for the format of its inputs, as
in `tf.nn.sampled_softmax_loss`, are then those of float32, and finite. All but the
last row comes after a failure, so that programs of one format are as fast as before.
What fails in float32 too fails as it does there, and so does bfloat16 beside float16
alone. Assertions and functions that call the user's own (`tf.cond`, loops and maps) are
not run again: in their bodies, each operator is.

What is converted to another format outside of operators is cast, from 16 bits or to
them: in `variable.assign(x)`, in what a `tf.py_function` returns, in the arguments of a
`tf.function` with a signature. Keras' own operators (`keras.ops`, and Python's on a
Keras variable) promote by Keras' rules first. NumPy arrays and numbers take the format
of the tensor beside them, as ever, but for numbers that 16 bits cannot hold.
"""

import re
import sys
from typing import Any

import keras
import tensorflow as tf

from tfamp.inspect import calls
from tfamp.keras_patches import hooks, patches
from tfamp.operators import again, gradients, loops, lost_numbers, single

_NOT_SUPPORTED = tf.__internal__.dispatch.OpDispatcher.NOT_SUPPORTED


def widened(outputs: Any) -> Any:
    """Returns a model's outputs with those of 16 bits in float32; others as they are.

    Args:
      outputs: Tensors in any structure, or None.
    """
    return keras.tree.map_structure(_as_float32, outputs)


def _as_float32(value):
    if not again.is_low(value):
        return value
    # Losses and metrics leave out what a mask hides.
    copy = calls.with_mask_of(tf.cast(value, "float32"), value)
    copy.narrow = value  # For gradients by it.
    return copy


@hooks.around
def _dispatch(original, op, args, kwargs):
    """For the function that TensorFlow asks, once `op` raised, for another result.

    Example: `tf.matmul(bfloat16, float32)` raises inside of `math_ops.matmul`. The
    user called that function, so it is the outermost: it runs again, with both in
    float32. Of what it called in turn, nothing is tried again.
    """
    result = original(op, args, kwargs)
    if result is not _NOT_SUPPORTED:
        return result
    error = sys.exc_info()[1]  # TensorFlow asks while it handles it.
    arguments = [*again.leaves([*args, *kwargs.values()])]
    # `x + 1e-12` tries float32 by itself, and then fails.
    number = lost_numbers.behind(error) or lost_numbers.among(arguments)
    is_outer = again.retryable_callers() < 2
    if op is tf.convert_to_tensor and not again.meet(arguments):
        if number and is_outer:
            again.note(str(number), "convert_to_tensor")
            return tf.constant(number.value, "float32")
        return result if number else _converted(arguments, is_outer)
    # What the user called is the one to try again.
    if not is_outer or not again.can_run(op.__name__, arguments):
        return result
    named = re.search(r"'(\w+)' Op|cannot compute (\w+) as", str(error))
    plain = re.sub(r"^_|_dispatch$|_v2$", "", op.__name__)
    meets = again.meet(arguments) and not number
    name = (named[1] or named[2]) if named and meets else plain
    try:
        with again.running():
            wide = {key: again.wide_argument(x) for key, x in kwargs.items()}
            result = op(*map(again.wide_argument, args), **wide)
    except Exception as error:
        raise error from None
    again.note(str(number) if number else again.reason(arguments), name)
    return result


def _converted(arguments, is_outer):
    """Returns another result of `tf.convert_to_tensor`, if there is one."""
    value, *others = arguments
    names = [getattr(x, "name", x) for x in others if isinstance(x, str | tf.DType)]
    wanted = [x for x in names if again.differ(again.format_of(value), x)]
    # Where a function of `tf` asks for 16 bits, all of it is computed in float32.
    can_cast = wanted and (is_outer or wanted[0] == "float32")
    return tf.cast(value, wanted[0]) if can_cast else _NOT_SUPPORTED


@hooks.around
def _of_float32(original, *args, **kwargs):
    """For a function that looks at formats itself, and has no second try."""
    arguments = [*args, *kwargs.values()]
    if again.low_formats(arguments):
        again.note(again.reason(arguments), original.__name__.strip("_"))
        kwargs = {name: again.wide(x) for name, x in kwargs.items()}
        args = again.wide(args)
    return original(*args, **kwargs)


@hooks.around
def _tf_tensor(original, tensor, dtype=None, name=None):
    """For what a tensor is converted by: `variable.assign(x)` computes nothing."""
    if dtype is not None and again.differ(tensor.dtype.name, dtype.name):
        if not again.retryable_callers():
            return tf.cast(tensor, dtype)
    return original(tensor, dtype, name)


@hooks.around
def _spec_cast(original, spec, value, casting_context):
    """For the arguments of a `tf.function` with a signature."""
    if isinstance(value, tf.Tensor):
        value = again.in_format(value, spec.dtype.name)
    return original(spec, value, casting_context)


@hooks.around
def _product(
    original,
    a,
    b,
    transpose_a=False,
    transpose_b=False,
    a_is_sparse=False,
    b_is_sparse=False,
    name=None,
):
    """For `tf.matmul` of bfloat16 and float32: SparseMatMul, which no GPU has."""
    if a_is_sparse or b_is_sparse or not again.meet([a, b]):
        return original(a, b, transpose_a, transpose_b, a_is_sparse, b_is_sparse, name)
    again.note(again.reason([a, b]), "matmul")
    return tf.matmul(again.wide(a), again.wide(b), transpose_a, transpose_b, name=name)


@hooks.around
def _check_operand(original, operator, operand):
    """For what a `tf.linalg.LinearOperator` is applied to: its operators promote."""
    if not again.differ(operator.dtype.name, again.format_of(operand)):
        original(operator, operand)


@hooks.around
def _check_matrix(original, operator, matrix):
    """For what one with a full matrix is made of, which must not be bfloat16."""
    original(operator, again.wide(matrix))


class _Hooks(hooks.HookGroup):
    def install(self) -> None:
        if not self.in_force():
            again.LINES.clear()
        super().install()


HOOKS = _Hooks(
    dispatch=_dispatch,
    __tf_tensor__=_tf_tensor,
    _apply_op_helper=single.apply_op_helper,
    TFE_Py_FastPathExecute=single.fast_path,
    execute=single.slow_path,
    while_loop=loops.while_loop,
    _tf_while_stmt=loops.autograph_loop,
    _check_same_outputs=loops.same_outputs,
    verify_single_cond_var=loops.same_variable,
    **dict.fromkeys(patches.OF_FLOAT32, _of_float32),
    sparse_matmul=_product,
    spec_cast=_spec_cast,
    _check_input_dtype=_check_operand,
    _check_matrix=_check_matrix,
    gradient_lookup=gradients.lookup,
    record_operation=gradients.recorded,
    output_gradient=gradients.by_outputs,
)
