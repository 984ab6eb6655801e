"""What the layers of a model compute in one training step: whether float16 holds it.

The step is run as a graph of its own, and undone.
"""

import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.inspect import calls
from tfamp.loss_scaling import train_steps
from tfamp.updates import saved_values


class Numbers(NamedTuple):
    """What a call of a layer took and made.

    Attributes:
      owner: The layer.
      is_finite: Whether all that it made is finite.
      largest: The largest magnitude of the finite numbers that it took and made.
      lost: The layers whose finite numbers it made infinite or NaN, and itself.
    """

    owner: keras.Operation
    is_finite: bool
    largest: float
    lost: list[keras.layers.Layer]


def run(model: keras.Model, batch: Any) -> list[Numbers]:
    """Returns the `Numbers` of each call in a training step, which is undone.

    Args:
      model: A compiled model.
      batch: A batch, as `train_step` takes it.
    """
    makers: list[list] = []
    own_step = train_steps.HOOKS.scales(model)  # Its model need not have a `call`.
    argument = batch if own_step else keras.utils.unpack_x_y_sample_weight(batch)[0]

    def run(argument):
        with tf.GradientTape() as tape:
            recorder = calls.Recorder(model, tape)
            with recorder.installed(is_stateless=not own_step):
                if own_step:
                    model.train_step(argument)
                else:
                    model(argument, training=True)
        leaves = {
            x.ref(): call.owner
            for call in recorder.calls
            if isinstance(call.owner, keras.layers.Layer) and not call.children
            for x in calls.floats(call.outputs)
        }
        measured = [_measure(x, leaves) for x in recorder.calls if x.results]
        makers.extend(owners for owners, _ in measured)
        return [numbers for _, numbers in measured]

    measured = _undone(run, argument)
    return [
        Numbers(owners[0][0], bool(is_finite), float(largest), _lost(owners, begins))
        for owners, (is_finite, begins, largest) in zip(makers, measured, strict=True)
    ]


def _undone(run, argument):
    """Returns what a function of tensors does, after what it wrote is undone."""
    traced = tf.function(run, autograph=False).get_concrete_function(argument)
    before = saved_values.SavedValues(traced.captured_inputs)
    try:
        return traced(argument)
    finally:
        before.restore()


def _measure(call, leaves):
    """Returns whose numbers are in each result of a call, and what is said of them.

    That is: whether all are finite, which results alone are not, and the largest.
    """
    sources = [_sources(x, call, leaves) for x in call.results]
    owners = [
        [call.owner, *(leaves[x.ref()] for x in each if x.ref() in leaves)]
        for each in sources
    ]
    begins = [
        tf.logical_and(_is_finite(took), tf.logical_not(_is_finite([x])))
        for x, took in zip(call.results, sources, strict=True)
    ]
    largest = _largest_of([*call.inputs, *call.results])
    return owners, (_is_finite(call.results), tf.stack(begins), largest)


def _lost(owners, begins):
    pairs = zip(owners, begins.numpy().tolist(), strict=True)
    return [layer for layers, is_lost in pairs if is_lost for layer in layers]


def _sources(tensor, call, leaves):
    """Returns what a tensor is computed from in a call: layers' results, arguments."""
    is_layer = isinstance(call.owner, keras.layers.Layer)
    if is_layer and not call.children:
        return call.inputs
    sources, visited = [], set()
    queue = [tensor] if is_layer else calls.floats(call.sources)
    stops = {x.ref() for x in calls.floats(call.arguments)} | leaves.keys()
    while queue:
        each = queue.pop()
        if each.ref() not in visited:
            visited.add(each.ref())
            sources += [each] * (each.ref() in stops)
            queue += [] if each.ref() in stops else each.op.inputs
    return sources


def _is_finite(tensors):
    holds = [
        tf.reduce_all(tf.math.is_finite(x)) for x in tensors if x.dtype.is_floating
    ]
    return tf.reduce_all(tf.stack(holds)) if holds else tf.constant(True)


def _largest_of(tensors):
    sizes = [tf.abs(tf.cast(x, "float32")) for x in tensors if x is not None]
    finite = [tf.where(tf.math.is_finite(x), x, 0.0) for x in sizes]
    return tf.reduce_max([0.0, *map(tf.reduce_max, finite)])


def largest_gradients(
    model: keras.Model, batch: Any
) -> dict[keras.Operation, float] | None:
    """Returns each layer's largest gradient, by what it makes and by its weights.

    The loss is not scaled. Empty for a model with a `train_step` of its own, whose loss
    is within that; None if the loss or a gradient is infinite or NaN.

    Args:
      model: A compiled model.
      batch: A batch, as `train_step` takes it.
    """
    owners = []
    # As Keras has it: a `compute_loss` of the user's own may do without.
    takes_training = "training" in inspect.signature(model.compute_loss).parameters
    keywords = {"training": True} if takes_training else {}

    def differentiate(batch):
        inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            recorder = calls.Recorder(model, tape)
            with recorder.installed(collect_losses=True):
                outputs = model(inputs, training=True)
                loss = model.compute_loss(inputs, targets, outputs, weights, **keywords)
        owners.extend(x.owner for x in recorder.calls)
        sources = [[*x.results, *_weights(x)] for x in recorder.calls]
        with train_steps.suspended():
            gradients = tape.gradient(loss, sources)
        taken = [x for each in gradients for x in each if x is not None]
        is_finite = _is_finite([loss, *map(tf.convert_to_tensor, taken)])
        return is_finite, [_largest_of(x) for x in gradients]

    if train_steps.HOOKS.scales(model):
        return {}
    is_finite, numbers = _undone(differentiate, batch)
    if not is_finite:
        return None
    return by_owner(zip(owners, map(float, numbers), strict=True))


def _weights(call):
    """Those of its owner that no recorded call has: a cell's, which runs in a loop."""
    if call.children or not isinstance(call.owner, keras.layers.Layer):
        return call.weights
    return [v.value for v in call.owner.trainable_variables if calls.is_trained(v)]


def by_owner(pairs: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    """Returns the largest number of each owner."""
    largest: dict[Any, float] = {}
    for owner, number in pairs:
        largest[owner] = max(largest.get(owner, 0.0), number)
    return largest
