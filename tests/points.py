"""The toy task of the tests: on which side of a plane a point lies."""

import contextlib
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tfamp.resume import backup
from tfamp.runs import base_config, tasks


def make_config(**settings):
    """Returns a run of the task in float32; `__` for a dot."""
    config = base_config.get_config()
    config.name, config.task = "points", "points:create"
    config.epochs, config.batch_size = 4, 8
    config.optimizer.learning_rate = 0.05
    config.precision.mode = "float32"
    config.model.dropout = 0.0
    given = {name.replace("__", "."): value for name, value in settings.items()}
    config.update_from_flattened_dict(given)
    return config


def create(config):
    """Returns the task: 80 training, 20 validation and 20 test examples."""
    points = np.random.default_rng(0).normal(size=(120, 4)).astype("float32")
    labels = (points @ [1, -2, 3, 1] > 0).astype("int32")
    whole = tf.data.Dataset.from_tensor_slices((points, labels))
    return tasks.Task(
        train=whole.take(80),
        validation=whole.skip(80).take(20),
        test=whole.skip(100),
        build_model=lambda: build_network(keras.layers.Dropout(config.model.dropout)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        description="points",
    )


def create_poisoned(config):
    """Returns the task with one training example whose loss is no number."""

    def poison(index, example):
        features, label = example
        return tf.where(index == 7, np.nan, features), label

    task = create(config)
    return task._replace(train=task.train.enumerate().map(poison))


def build_network(*layers):
    """Returns a model with layers between its two dense ones."""
    hidden = keras.layers.Dense(8, "relu")
    head = keras.layers.Dense(2, dtype="float32")
    return keras.Sequential([keras.Input((4,)), hidden, *layers, head])


@contextlib.contextmanager
def stopped(stop, epoch):
    """Calls a function after the metrics and before the backup of an epoch."""
    original = backup.BackupAndRestore.on_epoch_end

    def on_epoch_end(self, index, logs=None):
        if index + 1 == epoch:
            stop()
        original(self, index, logs)

    with mock.patch.object(backup.BackupAndRestore, "on_epoch_end", on_epoch_end):
        yield


def interrupt():
    """As Ctrl-C does."""
    raise KeyboardInterrupt
