"""Random changes of training images that leave their class as it is."""

from collections.abc import Callable

import tensorflow as tf

NONE = "none"
CROP_FLIP = "crop_flip"
NAMES = (NONE, CROP_FLIP)
_PADDING = 4


def create(name: str) -> Callable | None:
    """Returns what `tasks.Task` has as `augment`.

    Args:
      name: One of `NAMES`.

    Raises:
      ValueError: If there is no such augmentation.
    """
    if name not in NAMES:
        raise ValueError(
            f"Unknown augmentation. Received: config.data.augment={name!r}. "
            f"Expected one of {NAMES}."
        )
    return crop_and_flip if name == CROP_FLIP else None


def crop_and_flip(image, label, seed):
    """Shifts an image by up to 4 pixels and mirrors every second one.

    A random crop, as large as the image, out of the image with 4 black pixels on each
    side; then a horizontal flip with probability 1/2. Runs in tf.data, on 8 bits.

    Args:
      image: [height, width, channels], any dtype.
      label: Returned as it is.
      seed: int64 [2]; the outcome depends on nothing else.

    Returns:
      (image, label); shape and dtype as they were.

    References:
      He et al., "Deep Residual Learning for Image Recognition", 2016, section 4.2,
      https://arxiv.org/abs/1512.03385.
    """
    crop, flip = tf.unstack(tf.random.split(tf.convert_to_tensor(seed), 2))
    sides = ((_PADDING, _PADDING), (_PADDING, _PADDING), (0, 0))
    padded = tf.pad(image, sides)
    image = tf.image.stateless_random_crop(padded, image.shape, crop)
    return tf.image.stateless_random_flip_left_right(image, flip), label
