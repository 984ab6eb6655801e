"""Random numbers and moving statistics of replicas, from epoch to epoch."""

import keras
import tensorflow as tf

from tfamp.facts import names


class EpochSeeds(keras.callbacks.Callback):
    """Makes the random numbers of each epoch depend on the seed and epoch alone.

    Keras does not save the state of `SeedGenerator`s (dropout), so without this a
    resumed run would draw other numbers than the uninterrupted one. Replicas of a
    strategy would all draw the same; here each has its own numbers.
    """

    def __init__(self, steps_per_epoch: int):
        super().__init__()
        self.steps_per_epoch = steps_per_epoch

    def on_train_begin(self, logs=None):
        """Finds the generators' states."""
        states = [v for v in self.model.variables if v.name == "seed_generator_state"]

        def move(epoch):
            context = tf.distribute.get_replica_context()
            earlier = epoch * context.num_replicas_in_sync
            first = (earlier + context.replica_id_in_sync_group) * self.steps_per_epoch
            for state in states:
                seed = state.value[0]
                state.assign(tf.stack([seed, tf.cast(first, seed.dtype)]))

        self._move = _on_replicas(self.model, move)

    def on_epoch_begin(self, epoch, logs=None):
        """Moves each generator's counter to where the replica's epoch starts."""
        self._move(tf.constant(epoch))


class ReplicaStatistics(keras.callbacks.Callback):
    """Averages the moving statistics of normalization layers over the replicas.

    Keras 3.15 lets each replica keep its own: an evaluation would mix them, and a
    checkpoint hold the first one's. Without a strategy this does nothing.
    """

    def on_train_begin(self, logs=None):
        """Finds what the layers that train move besides their weights."""
        layers = names.flatten_layers(self.model)
        frozen = {id(w) for x in layers if not x.trainable for w in x.weights}
        moving = [
            weight.value
            for weight in self.model.non_trainable_weights
            if "float" in weight.dtype and id(weight) not in frozen
        ]

        def average():
            context = tf.distribute.get_replica_context()
            local = [tf.convert_to_tensor(weight) for weight in moving]
            means = context.all_reduce(tf.distribute.ReduceOp.MEAN, local)
            for weight, mean in zip(moving, means, strict=True):
                weight.assign(mean)

        self._average = lambda: None
        if moving and self.model.distribute_strategy.num_replicas_in_sync > 1:
            self._average = _on_replicas(self.model, average)

    def on_test_begin(self, logs=None):
        """Averages before the validation."""
        self._average()

    def on_epoch_end(self, epoch, logs=None):
        """Averages where there is no validation, before the epoch is saved."""
        self._average()


def _on_replicas(model, function):
    """Returns a function that runs another on each replica of the model's strategy."""
    strategy = model.distribute_strategy
    return tf.function(lambda *args: strategy.run(function, args), autograph=False)
