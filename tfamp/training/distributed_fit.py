"""Lets Keras' `fit` and `evaluate` run over several replicas."""

from typing import Any

import keras
import tensorflow as tf

# Keras 3.15 builds the metrics and the loss from the first batch of a dataset that it
# has distributed, and averages that batch over the replicas: an error if their parts
# are not of one size, and always over several workers. Guarded by
# tests/test_keras_contract.py.
_BUILD = "_maybe_symbolic_build"


def prepare(model: keras.Model, batch: Any, workers: int) -> None:
    """Does beforehand what `fit` and `evaluate` fail to do by themselves.

    Builds the metrics and the loss from a batch of this process. Over several workers
    it gives each result of a step a dimension, over which Keras 3.15 then averages
    the replicas' results; it fails to average scalars.

    Args:
      model: A compiled model; changed in place. Call in the strategy's scope.
      batch: (features, labels) as the model is trained on, of any number of examples.
      workers: Processes of the strategy's cluster; 1 without one.
    """
    getattr(model, _BUILD)(data_batch=batch)
    setattr(model, _BUILD, lambda iterator=None, data_batch=None: None)
    if workers > 1:
        for name in ("train_step", "test_step"):
            setattr(model, name, _with_dimension(getattr(model, name)))


def _with_dimension(step):
    def wrapped(data):
        return keras.tree.map_structure(lambda v: tf.reshape(v, [1]), step(data))

    return wrapped
