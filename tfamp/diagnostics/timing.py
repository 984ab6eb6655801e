"""Times of a step and of drawing a batch, for an audit on this host."""

import itertools
import statistics
import time
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfamp.diagnostics import layer_trace
from tfamp.precision import model_structure

_WARM_UP, _REPEATS = 2, 5
_BATCHES = 20


def pipeline_seconds(dataset: Iterable) -> float:
    """Returns the mean time to draw a batch, the first ones left out.

    Args:
      dataset: A `tf.data.Dataset`, or anything else that yields batches.

    Raises:
      ValueError: If there are too few batches.
    """
    batches = iter(dataset)
    for _ in itertools.islice(batches, _WARM_UP):
        pass
    start = time.perf_counter()
    drawn = sum(1 for _ in itertools.islice(batches, _BATCHES))
    if not drawn:
        raise ValueError(
            f"`dataset` must have more than {_WARM_UP} batches to be timed. "
            "Received fewer."
        )
    return (time.perf_counter() - start) / drawn


def step_seconds(model: keras.Model, inputs: Any, jit_compile: bool) -> float:
    """Returns the median time of a forward and a backward pass; changes no variable.

    The update of the weights is left out.

    Args:
      model: A built model.
      inputs: A batch as the model takes it.
      jit_compile: Whether XLA compiles it.
    """

    @tf.function(jit_compile=jit_compile, autograph=False)
    def step(batch):
        weights = [tf.convert_to_tensor(w) for w in model.trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch(weights)
            # Stateless: neither moving averages nor seeds are written.
            outputs, _ = model.stateless_call(
                weights, model.non_trainable_variables, batch, training=True
            )
            flat = [x for x in keras.tree.flatten(outputs) if x.dtype != tf.string]
            means = [tf.reduce_mean(tf.cast(x, "float32")) for x in flat]
        gradients = tape.gradient(means, weights)
        # The outputs, too: TensorFlow leaves out what nobody fetches.
        return [*means, *(g for g in gradients if g is not None)]

    with layer_trace.unchanged(model_structure.flatten_layers(model)):
        step(inputs)  # Traces it.
    times = []
    for _ in range(_WARM_UP + _REPEATS):
        start = time.perf_counter()
        for result in step(inputs):
            tf.convert_to_tensor(result).numpy()  # Waits for the device.
        times.append(time.perf_counter() - start)
    return statistics.median(times[_WARM_UP:])
