"""Loops and branches whose state or results have two formats.

A loop's state keeps the format that it began with, as a gradient keeps that of its
input: a recurrent cell that adds noise in float32 to a state of 16 bits returns it in
16 bits. The branches of a condition have one result, and float32 wins. Each body and
branch is traced once, as ever.
"""

import tensorflow as tf

from tfamp.operators import again


def while_loop(original):
    """For `tf.while_loop`, and what is made of it: maps, scans, recurrent layers."""

    def while_loop(cond, body, loop_vars, *args, **kwargs):
        def keeps(*state):
            return _like(body(*state), state)

        return original(cond, keeps, loop_vars, *args, **kwargs)

    return while_loop


def autograph_loop(original):
    """For a loop of Python's that AutoGraph makes one of TensorFlow's."""

    def loop(test, body, get_state, set_state, symbol_names, opts):
        def keeps():
            before = get_state()
            body()
            set_state(_like(get_state(), before))

        return original(test, keeps, get_state, set_state, symbol_names, opts)

    return loop


def _like(state, before):
    """Returns a state with what was of 16 bits, and has become float32, cast back."""
    new, old = (tf.nest.flatten(x, expand_composites=True) for x in (state, before))
    if len(new) != len(old):
        return state  # TensorFlow says what is wrong.
    pairs = [*zip(new, old, strict=True)]
    if not any(_is_widened(*pair) for pair in pairs):
        return state
    tensors = [tf.cast(x, y.dtype) if _is_widened(x, y) else x for x, y in pairs]
    return tf.nest.pack_sequence_as(state, tensors, expand_composites=True)


def _is_widened(x, y):
    """Whether one tensor is of float32, and another of 16 bits."""
    return again.is_low(y) and isinstance(x, tf.Tensor) and x.dtype == tf.float32


def same_outputs(original):
    """For where the traced branches of a condition are compared."""

    def check(op_type, graphs):
        rows = zip(*(graph.outputs for graph in graphs), strict=False)
        mixed = [
            i
            for i, each in enumerate(rows)
            if any(_is_widened(x, y) for x in each for y in each)
        ]
        for graph in graphs if mixed else ():
            with graph.as_default():
                outputs = [graph.outputs[i] for i in mixed]
                wide = {id(x): again.wide(x) for x in outputs}
            graph.outputs = [wide.get(id(x), x) for x in graph.outputs]
            graph.structured_outputs = tf.nest.map_structure(
                lambda x, wide=wide: wide.get(id(x), x),
                graph.structured_outputs,
                expand_composites=True,
            )
        return original(op_type, graphs)

    return check


def same_variable(original):
    """For where AutoGraph compares what the branches of an `if` left in a variable."""

    def verify(name, body_var, orelse_var):
        one, other = body_var, orelse_var
        if not (_is_widened(one, other) or _is_widened(other, one)):
            original(name, body_var, orelse_var)

    return verify
