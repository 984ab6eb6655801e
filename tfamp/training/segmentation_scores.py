"""Scores of segmentation as Keras metrics: Dice and IoU of all pixels, and by image."""

import keras
from keras import ops


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
    """Returns the Dice of each image; see `Dice`.

    Args:
      y_true: Classes, [batch, height, width, 1]; any number dtype.
      y_pred: Float32 probabilities [batch, height, width, 1] of the foreground, or
        [batch, height, width, classes].

    Returns:
      float32 [batch].
    """
    both, found, true = _count(y_true, y_pred, axis=(1, 2))
    return _mean_over_classes(2 * both, found + true)


class _Overlap(keras.metrics.Metric):
    """Counts the pixels of each class over all images.

    In int64: float32 stops to count at 2**24 pixels, 256 images of 256x256. Replicas'
    counts are added up.

    Args:
      classes: Number of classes; 2 are told by the probability of the second.
      name: Name.
      dtype: As in `keras.metrics.Metric`.

    Call arguments:
      y_true, y_pred: As for `image_dice`.
    """

    def __init__(self, classes, name, dtype="float32"):
        super().__init__(name=name, dtype=dtype)
        self.classes = classes
        shape = (1,) if classes == 2 else (classes,)
        self.both, self.found, self.true = (
            self.add_variable(shape, "zeros", dtype="int64", name=field)
            for field in ("both", "found", "true")
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Adds the pixels of a batch."""
        if sample_weight is not None:
            raise ValueError(
                f"{type(self).__name__} counts pixels. Expected sample_weight=None."
            )
        counts = _count(y_true, y_pred, axis=(0, 1, 2))
        variables = self.both, self.found, self.true
        for variable, count in zip(variables, counts, strict=True):
            variable.assign_add(count)

    def get_config(self):
        """Returns the constructor's keywords."""
        return {"classes": self.classes, "name": self.name, "dtype": self.dtype}


@keras.saving.register_keras_serializable(package="tfamp")
class Dice(_Overlap):
    """2 TP / (2 TP + FP + FN) over the pixels of all images: the F1 of the pixels.

    Of two classes that of the second; else the mean over those, the background among
    them, that occur in truth or prediction. 1 where there is nothing to find, and
    nothing found.

    Args:
      classes: Number of classes; 2 are told by the probability of the second.
      name: Name.
      dtype: As in `keras.metrics.Metric`.

    References:
      Dice, "Measures of the Amount of Ecologic Association Between Species", 1945,
      https://doi.org/10.2307/1932409
    """

    def __init__(self, classes, name="dice", dtype="float32"):
        super().__init__(classes, name, dtype)

    def result(self):
        """Returns the score so far: float32 scalar."""
        both, found, true = (v.value for v in (self.both, self.found, self.true))
        return _mean_over_classes(2 * both, found + true)


@keras.saving.register_keras_serializable(package="tfamp")
class IoU(_Overlap):
    """TP / (TP + FP + FN) over the pixels of all images: the Jaccard index.

    Classes are averaged as `Dice` does. Keras' own `MeanIoU` counts in float32.

    Args:
      classes: Number of classes; 2 are told by the probability of the second.
      name: Name.
      dtype: As in `keras.metrics.Metric`.
    """

    def __init__(self, classes, name="iou", dtype="float32"):
        super().__init__(classes, name, dtype)

    def result(self):
        """Returns the score so far: float32 scalar."""
        both, found, true = (v.value for v in (self.both, self.found, self.true))
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
