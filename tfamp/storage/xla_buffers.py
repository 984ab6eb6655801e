"""What a program that XLA compiled holds, from XLA's own assignment of buffers."""

from typing import Any

import tensorflow as tf

from tfamp.facts import names

_STAGE = "optimized_hlo_proto_serialized"
_PROTO = "tensorflow.compiler.xla.service.hlo_pb2:HloProto"


def held(function: Any, *args: Any) -> tuple[int, str]:
    """Returns what a compiled function holds besides what it is given.

    Those are its temporary buffers, which XLA allocates as one, and results that take
    no place of an argument. On a GPU the scratch memory of the chosen convolutions is
    among them. It compiles the function, and runs nothing but XLA's autotuning.

    Args:
      function: A `tf.function` with `jit_compile=True`.
      *args: What it is called with.

    Returns:
      Bytes, and "". If it does not compile, or this TensorFlow lacks what is read: 0,
      and why.

    References:
      `BufferAssignmentProto` in xla/service/hlo.proto,
      https://github.com/openxla/xla/blob/main/xla/service/hlo.proto
    """
    if (proto := names.resolve(_PROTO)) is None:
        return 0, f"TensorFlow {tf.__version__} has no {_PROTO}"
    try:
        text = function.experimental_get_compiler_ir(*args)(stage=_STAGE)
    except (tf.errors.OpError, ValueError, TypeError) as error:
        return 0, str(error).partition("\n")[0][:200]
    allocations = proto.FromString(text).buffer_assignment.buffer_allocations
    size = sum(
        each.size
        for each in allocations
        if not each.is_entry_computation_parameter
        and not each.is_constant
        and not each.is_thread_local
    )
    return size, "" if allocations else "XLA gave no assignment of buffers"
