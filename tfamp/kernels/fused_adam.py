"""Adam's update of a variable in one pass, and clipping without copies of squares.

Keras writes the update as some ten operations, each of which reads or writes tensors
of the size of the variable; TensorFlow has it as one kernel.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf


def apply(
    variable: tf.Variable,
    momentum: tf.Variable,
    velocity: tf.Variable,
    gradient: tf.Tensor | tf.IndexedSlices,
    *,
    step: tf.Tensor,
    learning_rate: tf.Tensor,
    beta_1: float,
    beta_2: float,
    epsilon: float,
) -> None:
    """Updates a variable and its two averages in place.

    ```
    momentum += (gradient - momentum) * (1 - beta_1)
    velocity += (gradient**2 - velocity) * (1 - beta_2)
    rate = learning_rate * sqrt(1 - beta_2**step) / (1 - beta_1**step)
    variable -= rate * momentum / (sqrt(velocity) + epsilon)
    ```

    The same as `keras.optimizers.Adam` up to rounding, also of `1 - beta`.

    Args:
      variable, momentum, velocity: float32, of one shape.
      gradient: The same shape; sparse rows are made dense, since the averages of the
        other rows decay, too.
      step: Scalar, counted from 1.
      learning_rate: Scalar.
      beta_1, beta_2, epsilon: Adam's.

    References:
      Kingma and Ba, "Adam", 2014, https://arxiv.org/abs/1412.6980
    """
    step = tf.cast(step, tf.float32)
    tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=momentum.handle,
        v=velocity.handle,
        beta1_power=tf.pow(tf.cast(beta_1, tf.float32), step),
        beta2_power=tf.pow(tf.cast(beta_2, tf.float32), step),
        lr=tf.cast(learning_rate, tf.float32),
        beta1=beta_1,
        beta2=beta_2,
        epsilon=epsilon,
        grad=tf.cast(tf.convert_to_tensor(gradient), tf.float32),
    )


def is_precise(beta: float) -> bool:
    """Whether `1 - beta` keeps four digits, as the kernel takes it: in float32."""
    if not isinstance(beta, float):
        return False
    kept = 1 - np.float32(beta)
    return 0 < beta < 1 and abs(kept - (1 - beta)) <= 1e-4 * (1 - beta)


def clip_by_global_norm(
    gradients: Sequence[tf.Tensor | tf.IndexedSlices | None], clip_norm: float
) -> list[tf.Tensor | tf.IndexedSlices | None]:
    """Scales gradients so that their common norm is at most `clip_norm`.

    As Keras does it, NaN and infinities included, but it writes no squares to memory
    and leaves an embedding's gradient sparse. As in Keras, rows of one index count each
    by itself in the norm: `row_gradients` sums them before.

    Args:
      gradients: Float tensors; None where there is no gradient.
      clip_norm: Largest norm.

    Returns:
      The same kinds; None where there was none. All NaN if the norm is not finite
      (of sparse gradients the rows that they have).
    """
    squares = [2 * tf.nn.l2_loss(_values(g)) for g in gradients if g is not None]
    norm = tf.sqrt(tf.add_n([tf.cast(square, tf.float32) for square in squares]))
    scale = clip_norm * tf.minimum(1 / norm, 1 / clip_norm)
    scale += norm - norm  # NaN unless the norm is finite.
    return [None if g is None else _scaled(g, scale) for g in gradients]


def _values(gradient):
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _scaled(gradient, scale):
    values = _values(gradient) * tf.cast(scale, gradient.dtype)
    if not isinstance(gradient, tf.IndexedSlices):
        return values
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
