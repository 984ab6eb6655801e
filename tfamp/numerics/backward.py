"""Backward passes: of a model, and of one call that is made again."""

import keras
import tensorflow as tf

from tfamp.facts import graph_context


def again(recorder, call, taken, upstream):
    """Makes a call again; returns its results, and its gradients given their own."""
    # oneDNN merges the gradients of a kernel and of a bias that have one upstream. One
    # of the model's pass and one of this, which waits for that, would make a cycle.
    if not graph_context.in_xla():  # Grappler removes an identity.
        upstream = [tf.raw_ops.DeepCopy(x=x) for x in upstream]
    with tf.GradientTape() as tape:
        tape.watch(taken)
        results = recorder.again(call, taken)
    sources = [*taken, *call.weights]
    return results, gradients(tape, results, sources, upstream) if upstream else []


def gradients(tape, target, sources, upstream=None):
    """Returns gradients as tensors, also of an embedding's rows; zeros for None."""
    zero = tf.UnconnectedGradients.ZERO
    result = tape.gradient(target, sources, upstream, zero)
    return keras.tree.map_structure(tf.convert_to_tensor, result)
