"""What segmentation minimizes and what it is scored by, in float32 and whole pixels."""

import keras
import numpy as np
from keras import ops

_SMOOTH = 1.0  # Keeps the soft Dice of an image without foreground finite.


@keras.saving.register_keras_serializable(package="tfamp")
class CrossEntropyAndDice(keras.losses.Loss):
    """Mean cross-entropy of the pixels plus the soft Dice loss.

    For each image, with the sums over its pixels and the mean over the classes (of a
    sigmoid: over its one class, the foreground)

    ```
    soft Dice loss = 1 - mean((2 sum(p t) + 1) / (sum(p) + sum(t) + 1))
    ```

    p is the predicted probability and t the truth, 0 or 1. Averaged over the images,
    so that replicas' losses average to that of one device. Everything is summed in
    float32, whatever the model computes in: a sum of pixels leaves float16's range.

    Where the probabilities are a sigmoid's or a softmax's, Keras takes their logits for
    the cross-entropy, so that it neither saturates nor stops to learn where a
    probability rounds to 0 or 1.

    Call arguments:
      y_true: Classes, [batch, height, width, 1]; any number dtype.
      y_pred: Float32 probabilities [batch, height, width, 1] of the foreground, or
        [batch, height, width, classes].

    References:
      Milletari et al., "V-Net", 2016, https://arxiv.org/abs/1606.04797 (soft Dice);
      Isensee et al., "nnU-Net", 2018, https://arxiv.org/abs/1809.10486 (the sum).
    """

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
        both = ops.sum(truth * y_pred, axis=(1, 2))
        either = ops.sum(truth, axis=(1, 2)) + ops.sum(y_pred, axis=(1, 2))
        dice = ops.mean((2.0 * both + _SMOOTH) / (either + _SMOOTH), axis=-1)
        return ops.mean(entropy, axis=(1, 2)) + (1.0 - dice)


def create(classes: int) -> list[keras.metrics.Metric]:
    """Returns new metrics: dice, which is the task's score, iou and image_dice.

    All are fractions, higher is better.

    Args:
      classes: Number of classes, the background among them.
    """
    by_image = keras.metrics.MeanMetricWrapper(image_dice, name="image_dice")
    return [Dice(classes, name="dice"), IoU(classes, name="iou"), by_image]


def to_classes(probabilities):
    """Returns the predicted class of each pixel.

    Args:
      probabilities: Float [..., 1] of the foreground, or [..., classes].

    Returns:
      int32 [...]: the likeliest class; of the foreground whether it is above 0.5.
    """
    if probabilities.shape[-1] == 1:
        return ops.cast(probabilities[..., 0] > 0.5, "int32")
    return ops.cast(ops.argmax(probabilities, axis=-1), "int32")


@keras.saving.register_keras_serializable(package="tfamp")
def image_dice(y_true, y_pred):
    """Returns the Dice of each image, float32 [batch]; see `Dice`."""
    return _dice(*_count(y_true, y_pred, axis=(1, 2)))


@keras.saving.register_keras_serializable(package="tfamp")
class Dice(keras.metrics.Metric):
    """2 TP / (2 TP + FP + FN) over the pixels of all images: the F1 of the pixels.

    Of two classes that of the second; else the mean over those, the background among
    them, that occur in truth or prediction. 1 where there is nothing to find, and
    nothing found; Keras' `MeanIoU` gives 0 there. Pixels are counted in int64: float32
    stops to count at 2**24, 256 images of 256x256.

    Args:
      classes: Number of classes; 2 are distinguished by the probability of the second.
      **keywords: As in `keras.metrics.Metric`.

    Call arguments:
      y_true, y_pred: As for `CrossEntropyAndDice`.

    References:
      Dice, "Measures of the Amount of Ecologic Association Between Species", 1945,
      https://doi.org/10.2307/1932409
    """

    def __init__(self, classes, **keywords):
        super().__init__(**keywords)
        self.classes = classes
        shape = (3, 1 if classes == 2 else classes)
        self.counts = self.add_variable(shape, "zeros", dtype="int64", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Adds the pixels of a batch."""
        if sample_weight is not None:
            raise ValueError("Pixels are counted. Expected sample_weight=None.")
        self.counts.assign_add(ops.stack(_count(y_true, y_pred, axis=(0, 1, 2))))

    def result(self):
        """Returns the score so far: float32 scalar."""
        return _dice(*ops.unstack(self.counts.value))

    def get_config(self):
        """Returns the constructor's keywords."""
        return {**super().get_config(), "classes": self.classes}


@keras.saving.register_keras_serializable(package="tfamp")
class IoU(Dice):
    """TP / (TP + FP + FN) over the pixels of all images: the Jaccard index.

    Counted and averaged as `Dice` does.
    """

    def result(self):
        """Returns the score so far: float32 scalar."""
        both, predicted, true = ops.unstack(self.counts.value)
        return _mean_over_classes(both, predicted + true - both)


def _count(y_true, y_pred, axis):
    """Returns the pixels of each class, int64: in both, predicted, true."""
    channels = y_pred.shape[-1]
    # Of two the foreground alone counts.
    classes = np.arange(channels, dtype="int32") if channels > 1 else 1
    predicted = ops.cast(to_classes(y_pred)[..., None] == classes, "int64")
    true = ops.cast(ops.cast(y_true, "int32") == classes, "int64")
    return [ops.sum(mask, axis=axis) for mask in (predicted * true, predicted, true)]


def _dice(both, predicted, true):
    return _mean_over_classes(2 * both, predicted + true)


def _mean_over_classes(part, whole):
    """Returns the mean of part / whole over the last axis, float32.

    Classes that do not occur are left out; 1 where none does.
    """
    occurs = ops.cast(whole > 0, "float32")
    # Above 2**24 pixels a count is rounded, by less than 1e-7 of itself.
    ratio = ops.cast(part, "float32") / ops.cast(ops.maximum(whole, 1), "float32")
    count = ops.sum(occurs, axis=-1)
    mean = ops.sum(ratio * occurs, axis=-1) / ops.maximum(count, 1.0)
    return ops.where(count > 0, mean, ops.ones_like(mean))
