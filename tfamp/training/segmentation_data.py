"""Images with masks: of a folder, of TFDS, or digits on photographs offline."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfamp import errors
from tfamp.training import data, segmentation_folder

_TRAIN_SHARE = 0.8  # Of the photographs' width, from the left.


class Splits(NamedTuple):
    """Examples in a fixed order.

    Attributes:
      train: Unbatched (image, mask): uint8 [height, width, 3] and the classes, uint8
        [height, width, 1]; of known cardinality.
      test: The same.
      note: What a reader should know of the masks; may be empty.
    """

    train: tf.data.Dataset
    test: tf.data.Dataset
    note: str


def load(config, data_dir: str | None, manual_dir: str | None) -> Splits:
    """Loads the examples that a configuration names.

    Args:
      config: `config.data` has
        name: "folder", see `segmentation_folder.read`; "digits", see `load_digits`; or
        a name in TFDS.
        classes: Number of classes, the background among them.
        image_size: Side that images are resized to; None: as they are.
        mask_feature, first_class: Of a TFDS data set, the name of the masks and the
        number in them that is class 0.
        `config.limit_examples` are taken of each split.
      data_dir: The folder, or that of data prepared by TFDS.
      manual_dir: Folder with a TFDS data set's original files.

    Returns:
      The `Splits`.

    Raises:
      DataError: If the data are missing or malformed.
      ValueError: If a setting makes no sense.
    """
    name, limit = config.data.name, config.limit_examples
    if name not in ("folder", "digits"):
        return _load_tfds(config, data_dir, manual_dir)
    if name == "folder":
        train, test = segmentation_folder.read(config.data, data_dir, limit)
    else:
        train, test = load_digits(config.data.image_size, config.data.classes, limit)
    datasets = (tf.data.Dataset.from_tensor_slices(tuple(x)) for x in (train, test))
    return Splits(*datasets, _describe_foreground(test.masks, config.data.classes))


def _describe_foreground(masks, classes):
    """Says how much foreground there is, and what it is worth to say all is."""
    if classes > 2:
        return ""
    share = float(np.mean(masks))
    return (
        f"foreground {share:.3f} of the test pixels (all foreground: Dice "
        f"{2 * share / (1 + share):.2f})"
    )


def load_digits(image_size: int | None, classes: int, limit: int = 0):
    """Writes scikit-learn's real digits on patches of its two photographs.

    Each of the 1797 digits is enlarged to half the image's side and set at a random
    place of a random patch, in white on a dark patch and in black on a bright one. The
    mask is where the ink covers more than half. The test split has other digits, and
    patches of other parts of the photographs. The same in every run; no download.

    Args:
      image_size: Side of the images, 8 to 128.
      classes: 2: ink or none. 11: none, or the digit and 1.
      limit: Examples of each split; 0: all.

    Returns:
      (train, test), `segmentation_folder.Examples`.

    Raises:
      ValueError: If the size or the number of classes is another.

    References:
      Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998.
    """
    if classes not in (2, 11) or image_size is None or not 8 <= image_size <= 128:
        raise ValueError(
            "Digits on photographs have 2 or 11 classes and a side of 8 to 128. "
            f"Received: config.data.classes={classes}, config.data.image_size="
            f"{image_size}."
        )
    parts = data.load_digits(image_size // 2)
    from sklearn import datasets

    photographs = datasets.load_sample_images().images
    border = round(photographs[0].shape[1] * _TRAIN_SHARE)
    areas = ([p[:, :border] for p in photographs], [p[:, border:] for p in photographs])
    rng = np.random.default_rng(0)
    train, test = (
        _write_digits(rng, data.limit(part, limit), area, image_size, classes)
        for part, area in zip(parts, areas, strict=True)
    )
    return train, test


def _write_digits(rng, digits, photographs, size, classes):
    """Returns `Examples`, one for each digit."""
    images, masks = [], []
    for digit, label in digits.as_numpy_iterator():
        photograph = photographs[rng.integers(len(photographs))]
        patch = _cut(rng, photograph, size).astype("float32")
        ink = np.zeros((size, size, 1), "float32")
        _cut(rng, ink, len(digit))[:] = digit / 255
        color = 255 if patch.mean() < 128 else 0
        images.append(np.rint(patch + ink * (color - patch)).astype("uint8"))
        number = 1 if classes == 2 else 1 + label
        masks.append(np.where(ink > 0.5, number, 0).astype("uint8"))
    return segmentation_folder.Examples(np.stack(images), np.stack(masks))


def _cut(rng, image, size):
    """Returns a random square of an image, not copied."""
    row, column = (rng.integers(side - size + 1) for side in image.shape[:2])
    return image[row : row + size, column : column + size]


def _load_tfds(config, data_dir, manual_dir):
    """Returns the splits train and test of a TFDS data set, resized."""
    settings = config.data
    if settings.image_size is None:
        raise ValueError(
            "Images of a TFDS data set differ in size. Received: config.data.image_size"
            f"=None, config.data.name={settings.name!r}. Set it: 128, for example."
        )
    builder = data.prepared_builder(settings.name, data_dir, manual_dir)
    features, splits = builder.info.features, builder.info.splits
    wanted = {"image", settings.mask_feature}
    if not wanted <= set(features) or not {"train", "test"} <= set(splits):
        raise errors.DataError(
            f"Data set {settings.name!r} lacks an image, a mask or a split. Received: "
            f"features {', '.join(features)}; splits {', '.join(splits)}. Expected "
            f"image, {settings.mask_feature} (config.data.mask_feature); train, test."
        )

    def prepare(example):
        mask = tf.cast(example[settings.mask_feature], tf.int32) - settings.first_class
        last = settings.classes - 1
        expected = f"Masks have classes {settings.first_class} and on, {last + 1} of "
        expected += "them: see config.data.first_class and config.data.classes."
        checks = [
            tf.debugging.assert_non_negative(mask, expected),
            tf.debugging.assert_less_equal(mask, last, expected),
        ]
        with tf.control_dependencies(checks):
            mask = tf.cast(mask, tf.uint8)
        image, mask = segmentation_folder.resize(
            example["image"], mask, settings.image_size
        )
        side = settings.image_size
        return tf.ensure_shape(image, (side, side, 3)), tf.ensure_shape(
            mask, (side, side, 1)
        )

    train, test = (
        data.limit(
            builder.as_dataset(split=split, shuffle_files=False), config.limit_examples
        ).map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
        for split in ("train", "test")
    )
    return Splits(train, test, "")
