"""Losses that Keras does not have."""

import keras


@keras.saving.register_keras_serializable(package="tfamp")
class SmoothedCrossEntropy(keras.losses.Loss):
    """Cross-entropy of integer classes with label smoothing, from logits.

    Keras smooths one-hot labels alone. The target is `1 - label_smoothing` of the one
    class and `label_smoothing` spread evenly over all.

    Args:
      label_smoothing: Float in [0, 1).
      name: Of the loss.
      reduction: As in `keras.losses.Loss`.

    References:
      Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2016,
      section 7, https://arxiv.org/abs/1512.00567.
    """

    def __init__(
        self,
        label_smoothing,
        name="smoothed_cross_entropy",
        reduction="sum_over_batch_size",
    ):
        super().__init__(name=name, reduction=reduction)
        if not 0 <= label_smoothing < 1:
            raise ValueError(
                "`label_smoothing` must be in [0, 1). "
                f"Received: label_smoothing={label_smoothing}."
            )
        self.label_smoothing = label_smoothing

    def call(self, y_true, y_pred):
        """Returns the losses of a batch.

        Args:
          y_true: Classes, whole numbers of any dtype, [batch] or [batch, 1].
          y_pred: Logits [batch, classes].

        Returns:
          [batch], in the dtype of the logits.
        """
        classes = y_pred.shape[-1]
        labels = keras.ops.reshape(keras.ops.cast(y_true, "int32"), (-1,))
        return keras.losses.categorical_crossentropy(
            keras.ops.one_hot(labels, classes, dtype=y_pred.dtype),
            y_pred,
            from_logits=True,
            label_smoothing=self.label_smoothing,
        )

    def get_config(self):
        """Returns the constructor's keywords."""
        return {**super().get_config(), "label_smoothing": self.label_smoothing}
