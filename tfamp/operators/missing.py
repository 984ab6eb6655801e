"""Operators that a device computes in float32 and not in a 16-bit format.

Read from TensorFlow's registry of kernels: what has none fails only when it runs, and
in a graph on a GPU it is moved to the host without a word.
"""

import functools
from typing import Any

import tensorflow as tf

from tfamp.facts import graph_context, names
from tfamp.keras_patches import patches

_KERNELS, _DEFINITIONS = patches.OPERATORS
_HOLDERS = (tf.resource.as_datatype_enum, tf.variant.as_datatype_enum)
# What XLA's registry has for 16 bits, and its compiler ends at, or has for float32
# alone: TensorFlow 2.21.
_NOT_BY_XLA = frozenset(
    "LRN LRNGrad MaxPool3DGradGrad MaxPoolGradGrad MaxPoolGradGradV2 "
    "NonMaxSuppressionV3 NonMaxSuppressionV4 ParameterizedTruncatedNormal Range "
    "ResizeBilinearGrad StatelessMultinomial TruncatedNormal".split()
)
_ALL = frozenset({"float32", "bfloat16", "float16"})


def lacks_kernel(operator: str, inputs: tuple[str, ...], format: str) -> bool:
    """Whether only float32 is computed where a step runs: on a GPU, or on the host.

    Args:
      operator: Name of an operator, as "Lgamma".
      inputs: Names of those of its inputs that have the format.
      format: "bfloat16" or "float16".
    """
    if is_not_by_xla(operator):
        return True
    return _lacks(operator, inputs, format, bool(tf.config.get_visible_devices("GPU")))


def is_not_by_xla(operator: str) -> bool:
    """Whether XLA, for which a graph is traced, computes it in float32 alone."""
    return operator in _NOT_BY_XLA and graph_context.in_xla()


@functools.cache
def types_of_inputs(operator: str) -> dict[str, str]:
    """Returns {name of an input: the attribute that is its type}, "" if it is fixed.

    Empty for what has its format from elsewhere: from a variable, or to check it.
    """
    definition = names.resolve(_DEFINITIONS, lambda name: None)(operator)
    inputs = definition.input_arg if definition else ()
    if any(x.is_ref or x.type in _HOLDERS for x in inputs) or "Numeric" in operator:
        return {}
    return {x.name: x.type_attr or x.type_list_attr for x in inputs}


@functools.cache
def _lacks(operator, inputs, format, has_gpu):
    types = types_of_inputs(operator)
    attributes = {types[each] for each in inputs if types.get(each)}
    for device in ("GPU", "CPU") if has_gpu else ("CPU",):
        by_type = _formats(operator, device)
        if any("float32" in each for each in by_type.values()):
            lacked = [x for x in attributes if format not in by_type.get(x, _ALL)]
            return any("float32" in by_type[x] for x in lacked)
    return False


@functools.cache
def _formats(operator, device) -> dict[str, set[str]]:
    """Returns {type of inputs: formats}, as far as a device computes it."""
    definition: Any = names.resolve(_DEFINITIONS, lambda name: None)(operator)
    allowed = {
        x.name: x.allowed_values for x in (definition.attr if definition else ())
    }
    by_type = {x: set() for x in types_of_inputs(operator).values() if x}
    listed: Any = names.resolve(_KERNELS)
    for kernel in listed(operator).kernel if listed and by_type else ():
        if kernel.device_type == device and not kernel.label:
            limits = {x.name: x.allowed_values for x in kernel.constraint}
            for name, formats in by_type.items():
                computed = _named(limits[name]) if name in limits else _ALL
                formats |= computed & (_named(allowed[name]) or _ALL)
    return by_type


def _named(values):
    return {tf.as_dtype(x).name for x in values.list.type} & _ALL
