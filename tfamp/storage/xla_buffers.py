"""What a program that XLA compiles holds beside what it is given, by XLA's own plan."""

from collections.abc import Callable

import tensorflow as tf


def held(step: Callable, batch) -> int | None:
    """Compiles a step for the device, and returns the bytes that XLA allocates for it.

    They are one block for all that is made and taken inside, and the results that take
    no parameter's place: XLA's buffer assignment, which
    `experimental_get_compiler_ir` returns with the program.

    Args:
      step: A `tf.function` with `jit_compile=True`, not yet called.
      batch: Its argument.

    Returns:
      None where XLA does not compile it, or tells no assignment.
    """
    from tensorflow.compiler.xla.service import hlo_pb2

    program = hlo_pb2.HloProto()
    try:
        compiled = step.experimental_get_compiler_ir(batch)
        program.ParseFromString(compiled(stage="optimized_hlo_proto_serialized"))
    except (tf.errors.OpError, ValueError, TypeError):
        return None
    allocations = program.buffer_assignment.buffer_allocations
    if not allocations:
        return None
    return sum(
        each.size
        for each in allocations
        # A thread's own are registers and the stack, on a CPU.
        if not (
            each.is_entry_computation_parameter
            or each.is_constant
            or each.is_thread_local
        )
    )
