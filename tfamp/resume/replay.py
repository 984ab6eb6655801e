"""Batches that were trained on before a stop are read again, and passed over."""

import itertools
import sys
import threading

import tensorflow as tf

from tfamp import errors
from tfamp.facts import names, user_code
from tfamp.keras_patches import hooks

# What Keras' `fit` takes the batches of an epoch from.
ITERATOR = "keras.src.trainers.epoch_iterator:EpochIterator"
ENUMERATE = "_enumerate_iterator"
_GENERATOR = "keras.src.trainers.data_adapters.generator_data_adapter"


def is_training(frame, model) -> bool:
    """Whether a frame is within `fit` of a model."""
    while frame is not None:
        if frame.f_code.co_name == "fit" and frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back
    return False


def pass_over(model, epochs, calls, step, restore):
    """Has the epoch that Keras begins now go on where it was stopped.

    Keras makes the variables of metrics, and of optimizers that are not `compile`'s, in
    the first step. So the first batches that are passed over are trained on, and the
    state is restored after that. Keras has no hook where an epoch takes its batches:
    the function that counts them is replaced until it is called.

    Args:
      model: The model that is trained, in this thread.
      epochs: Epochs before it, whose batches are read again.
      calls: Calls of the training function before.
      step: The training function.
      restore: Function that restores the state.
    """
    kind, thread = names.resolve(ITERATOR), threading.get_ident()
    if not hasattr(kind, ENUMERATE):
        raise errors.RunError(
            "This release of Keras iterates over batches in a way that tfamp does not "
            f"support. Received: no {ITERATOR}.{ENUMERATE}. Use "
            "keras.callbacks.BackupAndRestore."
        )

    def make(original):
        def enumerate_rest(self):
            if threading.get_ident() != thread:
                yield from original(self)
                return
            hook.remove()  # It was for one epoch, or for a `fit` that has failed.
            if not is_training(sys._getframe(), model):
                yield from original(self)
                return
            if type(self.data_adapter).__module__ == _GENERATOR:
                user_code.warn(
                    "A generator cannot be read again: a resumed training continues "
                    "with whatever the generator yields then. Pass arrays, a "
                    "tf.data.Dataset or a keras.utils.PyDataset."
                )
            read = _read(model.steps_per_execution)
            functions = itertools.chain([step], itertools.repeat(read))
            for _ in range(epochs):
                with self.catch_stop_iteration():
                    for *_, iterator in original(self):
                        next(functions)(iterator)
            steps = original(self)
            for *_, iterator in itertools.islice(steps, calls):
                next(functions)(iterator)
            restore()
            yield from steps

        return enumerate_rest

    hook = hooks.Hook(kind, ENUMERATE, make)


def _read(count):
    """Returns a function that takes as many batches as the training function does."""

    def read(iterator):
        for taken in range(count):
            try:
                iterator.get_next()
            except (tf.errors.OutOfRangeError, StopIteration):
                if taken == 0:
                    raise tf.errors.OutOfRangeError(
                        None, None, "no more data"
                    ) from None
                return  # Keras trains on what is left in its last call.

    return read
