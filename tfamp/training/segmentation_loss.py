"""The loss of segmentation: cross-entropy and soft Dice, in float32."""

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="tfamp")
class CrossEntropyAndDice(keras.losses.Loss):
    """Mean cross-entropy of the pixels plus `dice_weight` times the soft Dice loss.

    For each image, with the sums over its pixels and the mean over the classes (of a
    sigmoid: over its one class, the foreground)

    ```
    soft Dice loss = 1 - mean((2 sum(p t) + smooth) / (sum(p) + sum(t) + smooth))
    ```

    p is the predicted probability and t the truth, 0 or 1. Averaged over the images,
    so that replicas' losses average to that of one device. Everything is summed in
    float32, whatever the model computes in: a sum of pixels leaves float16's range.

    Where the probabilities are a sigmoid's or a softmax's, Keras takes their logits for
    the cross-entropy, so that it neither saturates nor stops to learn where a
    probability rounds to 0 or 1.

    Args:
      dice_weight: Float >= 0. 0: cross-entropy alone.
      smooth: Float > 0. Keeps an image without foreground finite.
      name: Name.
      reduction: As in `keras.losses.Loss`.
      dtype: As in `keras.losses.Loss`.

    Call arguments:
      y_true: Classes, [batch, height, width, 1]; any number dtype.
      y_pred: Float32 probabilities [batch, height, width, 1] of the foreground, or
        [batch, height, width, classes].

    References:
      Milletari et al., "V-Net", 2016, https://arxiv.org/abs/1606.04797 (soft Dice);
      Isensee et al., "nnU-Net", 2018, https://arxiv.org/abs/1809.10486 (the sum).
    """

    def __init__(
        self,
        dice_weight=1.0,
        smooth=1.0,
        name="cross_entropy_and_dice",
        reduction="sum_over_batch_size",
        dtype="float32",
    ):
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        if dice_weight < 0 or smooth <= 0:
            raise ValueError(
                "`dice_weight` must be at least 0 and `smooth` above 0. Received: "
                f"dice_weight={dice_weight}, smooth={smooth}."
            )
        self.dice_weight = dice_weight
        self.smooth = smooth

    def call(self, y_true, y_pred):
        """Returns the loss of each image: float32 [batch]."""
        classes = y_pred.shape[-1]
        if classes == 1:
            entropy = keras.losses.binary_crossentropy(y_true, y_pred)
            truth = y_true
        else:
            labels = ops.cast(y_true[..., 0], "int32")
            entropy = keras.losses.sparse_categorical_crossentropy(labels, y_pred)
            truth = ops.one_hot(labels, classes, dtype=y_pred.dtype)
        entropy = ops.mean(entropy, axis=(1, 2))
        return entropy + self.dice_weight * self._dice_loss(truth, y_pred)

    def _dice_loss(self, truth, probabilities):
        both = ops.sum(truth * probabilities, axis=(1, 2))
        either = ops.sum(truth, axis=(1, 2)) + ops.sum(probabilities, axis=(1, 2))
        dice = (2.0 * both + self.smooth) / (either + self.smooth)
        return 1.0 - ops.mean(dice, axis=-1)

    def get_config(self):
        """Returns the constructor's keywords."""
        own = {"dice_weight": self.dice_weight, "smooth": self.smooth}
        return {**super().get_config(), **own}
