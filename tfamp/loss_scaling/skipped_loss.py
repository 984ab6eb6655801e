"""Whether the loss of a skipped step was finite: if not, no lower loss scale helps.

Only a step that was skipped looks at it: no other one has anything to do.
"""

import contextvars
import weakref
from typing import Any

import tensorflow as tf

# Function that returns the loss that was scaled last in this context; threads have
# their own.
_loss = contextvars.ContextVar[Any]("loss", default=lambda: None)


def note(loss: Any) -> None:
    """Notes the loss of a step in this thread, before it is scaled."""
    tensors = [x for x in tf.nest.flatten(loss) if isinstance(x, tf.Tensor)]
    _loss.set(lambda: None)
    if len(tensors) == 1:  # A symbol lives as long as its graph, which must end.
        loss = tensors[0]
        is_symbol = tf.is_symbolic_tensor(loss)
        _loss.set(weakref.ref(loss) if is_symbol else lambda: loss)


def last() -> Any:
    """Returns the loss that was noted last, if the step that runs computed it."""
    loss = _loss.get()()
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not getattr(loss, "graph", None) and graph is not None:
        graph = getattr(graph, "outer_graph", None)  # A branch or program of it.
    return loss if graph is getattr(loss, "graph", None) else None


class SkippedLoss:
    """The loss of the last skipped step, on the device; never part of a checkpoint.

    An object of a plain class, which neither Keras nor TensorFlow looks into.
    """

    def __init__(self):
        """Creates it under the current strategy."""
        # TensorFlow keeps integers of 32 bits on the host, where no program on a GPU
        # reads them.
        self._not_finite = tf.Variable(
            0.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def record(self, loss: Any, finite: Any) -> None:
        """Notes the loss in a step that is skipped.

        Args:
          loss: What `last` returned in the step; replicas note that of the first.
          finite: Whether the step is not skipped: bool [].
        """
        failed = tf.constant(0.0)
        if loss is not None:
            holds = tf.reduce_all(tf.math.is_finite(loss))
            failed = tf.cast(tf.logical_not(holds), failed.dtype)
        self._not_finite.assign(tf.where(finite, self._not_finite.read_value(), failed))

    def was_finite(self) -> bool:
        """Whether the loss of the last skipped step was finite, on all replicas."""
        return not int(self._not_finite.numpy())
