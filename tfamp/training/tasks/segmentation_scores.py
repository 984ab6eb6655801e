"""What segmentation minimizes and what it is scored by, in float32 and whole pixels."""

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


def create(classes: int) -> list[keras.metrics.Metric]:
    """Returns new metrics: dice, which is the task's score, iou and image_dice.

    All are fractions, higher is better.

    Args:
      classes: Number of classes, the background among them.
    """
    by_image = keras.metrics.MeanMetricWrapper(image_dice, name="image_dice")
    return [Dice(classes), IoU(classes), by_image]


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
    both, found, true = _count(y_true, y_pred, axis=(1, 2))
    return _mean_over_classes(2 * both, found + true)


@keras.saving.register_keras_serializable(package="tfamp")
class Dice(keras.metrics.Metric):
    """2 TP / (2 TP + FP + FN) over the pixels of all images: the F1 of the pixels.

    Of two classes that of the second; else the mean over those, the background among
    them, that occur in truth or prediction. 1 where there is nothing to find, and
    nothing found. Pixels are counted in int64: float32 stops to count at 2**24, 256
    images of 256x256. Keras' `BinaryIoU` and `MeanIoU` count so since 3.15, have no
    Dice, give 0 for nothing to find, and took 7 times as long for two classes.

    Args:
      classes: Number of classes; 2 are told by the probability of the second.
      name: Name.
      dtype: As in `keras.metrics.Metric`.

    Call arguments:
      y_true, y_pred: As for `CrossEntropyAndDice`.

    References:
      Dice, "Measures of the Amount of Ecologic Association Between Species", 1945,
      https://doi.org/10.2307/1932409
    """

    def __init__(self, classes, name="dice", dtype="float32"):
        super().__init__(name=name, dtype=dtype)
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
        both, found, true = ops.unstack(self.counts.value)
        return _mean_over_classes(2 * both, found + true)

    def get_config(self):
        """Returns the constructor's keywords."""
        return {"classes": self.classes, "name": self.name, "dtype": self.dtype}


@keras.saving.register_keras_serializable(package="tfamp")
class IoU(Dice):
    """TP / (TP + FP + FN) over the pixels of all images: the Jaccard index.

    Counted and averaged as `Dice` does.
    """

    def __init__(self, classes, name="iou", dtype="float32"):
        super().__init__(classes, name, dtype)

    def result(self):
        """Returns the score so far: float32 scalar."""
        both, found, true = ops.unstack(self.counts.value)
        return _mean_over_classes(both, found + true - both)


def _count(y_true, y_pred, axis):
    """Returns the pixels of each class, int64: in both, predicted, true."""
    found, true = to_classes(y_pred), ops.cast(y_true[..., 0], "int32")
    if y_pred.shape[-1] == 1:  # The foreground alone counts.
        masks = [found[..., None], true[..., None]]
    else:
        masks = [ops.one_hot(x, y_pred.shape[-1], dtype="int32") for x in (found, true)]
    masks = [ops.cast(mask, "int64") for mask in masks]
    return [ops.sum(mask, axis=axis) for mask in (masks[0] * masks[1], *masks)]


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
