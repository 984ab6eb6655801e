"""Values of the variables that a function uses, to undo a call of it."""

from collections.abc import Container, Sequence

import tensorflow as tf


class SavedValues:
    """The values of the variables that a function uses, on the host.

    On the device they would be a second copy of weights and slots.

    Args:
      captured: The tensors that the function captures.
      without: The ids of those that are left out.
    """

    def __init__(self, captured: Sequence[tf.Tensor], without: Container[int] = ()):
        with tf.device("CPU:0"):
            self._values = [
                (handle, tf.identity(_read(handle, dtype)))
                for handle in captured
                if id(handle) not in without and (dtype := _dtype(handle)) is not None
            ]

    def restore(self) -> None:
        """Gives the variables these values again."""
        for handle, value in self._values:
            with tf.device(handle.device):
                tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def _dtype(handle):
    """Returns the dtype of a variable by its handle; None of other tensors."""
    data = getattr(handle, "_handle_data", None)  # TensorFlow 2.21.
    if handle.dtype != tf.resource or data is None or not data.is_set:
        return None
    return tf.as_dtype(data.shape_and_type[0].dtype)


def _read(handle, dtype):
    with tf.device(handle.device):
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
