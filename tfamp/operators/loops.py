"""Loops and branches whose state or results have two formats.

A loop's state keeps the format that it began with, as a gradient keeps that of its
input: a recurrent cell that adds noise in float32 to a state of 16 bits returns it in
16 bits, and a sum that begins with zeros of float32 stays float32. The branches of a
condition have one result, and float32 wins. Each body and branch is traced once, as
ever.
"""

import tensorflow as tf

from tfamp.keras_patches import hooks
from tfamp.operators import again


@hooks.around
def while_loop(original, cond, body, loop_vars, *args, **kwargs):
    """For `tf.while_loop`, and what is made of it: maps, scans, recurrent layers."""

    def keeps(*state):
        return _like(body(*state), state)

    return original(cond, keeps, loop_vars, *args, **kwargs)


@hooks.around
def autograph_loop(original, test, body, get_state, set_state, symbol_names, opts):
    """For a loop of Python's that AutoGraph makes one of TensorFlow's."""

    def keeps():
        before = get_state()
        body()
        set_state(_like(get_state(), before))

    return original(test, keeps, get_state, set_state, symbol_names, opts)


def _like(state, before):
    """Returns a state in the formats that it had, of float32 and 16 bits."""
    new, old = (tf.nest.flatten(x, expand_composites=True) for x in (state, before))
    if len(new) != len(old):
        return state  # TensorFlow says what is wrong.
    pairs = [*zip(new, old, strict=True)]
    if not any(map(again.meet, pairs)):
        return state
    tensors = [again.in_format(x, again.format_of(y)) for x, y in pairs]
    return tf.nest.pack_sequence_as(state, tensors, expand_composites=True)


@hooks.around
def same_outputs(original, op_type, graphs):
    """For where the traced branches of a condition are compared."""
    rows = zip(*(graph.outputs for graph in graphs), strict=False)
    mixed = [i for i, each in enumerate(rows) if again.meet(each)]
    for graph in graphs if mixed else ():
        with graph.as_default():
            wide = {id(graph.outputs[i]): again.wide(graph.outputs[i]) for i in mixed}
        graph.outputs = [wide.get(id(x), x) for x in graph.outputs]
        graph.structured_outputs = tf.nest.map_structure(
            lambda x, wide=wide: wide.get(id(x), x),
            graph.structured_outputs,
            expand_composites=True,
        )
    return original(op_type, graphs)


@hooks.around
def same_variable(original, name, body_var, orelse_var):
    """For where AutoGraph compares what the branches of an `if` left in a variable."""
    if not again.meet((body_var, orelse_var)):
        original(name, body_var, orelse_var)
