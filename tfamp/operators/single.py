"""Single operators that fail on 16 bits are computed in float32.

In graphs where they are added, eagerly where they run. If a function of `tf` is around
that can be called again, it is: see `promotion`.
"""

import re

import tensorflow as tf

from tfamp.facts import formats
from tfamp.keras_patches import hooks
from tfamp.operators import again, kernel_registry, lost_numbers

_MIXED = re.compile(r"cannot compute \w+ as input .* a (\w+) tensor but is a (\w+) ")
_LOW = {tf.as_dtype(name).as_datatype_enum for name in formats.LOW}


class OperatorError(TypeError):
    """Has TensorFlow ask for another result of a function around."""


@hooks.around
def apply_op_helper(original, /, op_type_name, name=None, **keywords):
    """For what adds an operator to a graph."""
    low = {key: x for key, each in keywords.items() if (x := _low_format(each))}
    if not low:
        # What is drawn has no input, and the format that is asked for.
        is_low = keywords.get("dtype") in _LOW
        if is_low and kernel_registry.is_not_by_xla(op_type_name):
            keywords["dtype"] = tf.float32.as_datatype_enum
        return original(op_type_name, name, **keywords)
    try:
        if _lacks_kernel(op_type_name, low):
            raise OperatorError(f"'{op_type_name}' Op has no kernel for 16 bits")
        return original(op_type_name, name, **keywords)
    except (TypeError, ValueError) as error:
        low_formats = again.low_formats(keywords.values())
        if not low_formats or lost_numbers.behind(error) or again.retryable_callers():
            raise
    wide = {key: again.wide(value) for key, value in keywords.items()}
    result = original(op_type_name, name, **wide)
    again.note(again.reason(keywords.values()), op_type_name)
    return result


def _low_format(value):
    """Returns the 16-bit format of a tensor, or of one in a list; "" for none."""
    return next((x.dtype.name for x in again.leaves([value]) if again.is_low(x)), "")


def _lacks_kernel(operator, low):
    low_formats = set(low.values())
    is_one = len(low_formats) == 1
    return is_one and kernel_registry.lacks_kernel(operator, tuple(low), *low_formats)


@hooks.around
def fast_path(original, *arguments):
    """For what runs an eager operator. Each one comes here: only a failure may cost."""
    try:
        return original(*arguments)
    except Exception as error:
        context, operator, name, *inputs = arguments
        if not _fails_in(operator, inputs, error):
            raise
        failure = error
    if again.retryable_callers(operators=False):
        raise OperatorError(failure.message) from None
    result = original(context, operator, name, *map(again.wide, inputs))
    again.note(again.reason(inputs), operator)
    return result


@hooks.around
def slow_path(original, op_name, num_outputs, inputs, attrs, ctx, name=None):
    """For the same, of inputs that had to be converted first."""
    try:
        return original(op_name, num_outputs, inputs, attrs, ctx, name)
    except Exception as error:
        operator = op_name.decode() if isinstance(op_name, bytes) else op_name
        if not _fails_in(operator, inputs, error):
            raise
        failure = error
    if again.retryable_callers():
        raise OperatorError(failure.message) from None
    values = [*map(again.wide, inputs)]
    types = kernel_registry.types_of_inputs(operator).values()
    pairs = [
        (key, tf.float32.as_datatype_enum if key in types and x in _LOW else x)
        for key, x in zip(attrs[::2], attrs[1::2], strict=True)
    ]
    flat = [each for pair in pairs for each in pair]
    result = original(op_name, num_outputs, values, tuple(flat), ctx, name)
    again.note(again.reason(inputs), operator)
    return result


def _fails_in(operator, inputs, error):
    """Whether an operator failed for the 16-bit formats of its inputs."""
    message = getattr(error, "message", "")
    if not again.low_formats(inputs) or not isinstance(message, str) or not message:
        return False  # No failure of a kernel.
    named = zip(kernel_registry.types_of_inputs(operator), inputs, strict=False)
    low = {key: x for key, each in named if (x := _low_format(each))}
    return _lacks_kernel(operator, low) or _MIXED.search(message)
