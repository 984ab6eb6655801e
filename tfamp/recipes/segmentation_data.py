"""Images with masks: of a folder, of TFDS, or digits on photographs offline."""

import pathlib

import numpy as np
import tensorflow as tf
from ml_collections import config_dict

from tfamp import errors, extras
from tfamp.recipes import data, images_data

_SEED = 0  # Of what is held out: the same examples in every run.
_TRAIN_SHARE = 0.8  # Of the photographs' width, from the left.
_LAYOUT = (
    "images/NAME.png and masks/NAME.png, or in folders train and test such folders"
)


def load(config: config_dict.ConfigDict):
    """Loads the examples that a configuration names.

    A folder has images/NAME.png and masks/NAME.png, or .jpg or what else Pillow reads;
    a share of the names is held out, the same in every run. Or FOLDER/train and
    FOLDER/test each have folders of images and masks. A mask of two classes has the
    values 0 and 255, or 0 and 1; one of several has the numbers of the classes as gray
    levels or of a palette. Images are turned as their Exif data say.

    Args:
      config: `config.data.name` is "folder"; "digits", scikit-learn's digits on its
        photographs; or a name in TFDS. `config.data` has what
        `segmentation.get_config` says of images and masks, and
        `config.limit_examples` are taken of each split. `config.data_dir` is the
        folder, or that of data prepared by TFDS; `config.manual_dir` has a TFDS data
        set's original files, or its images and masks.

    Returns:
      (train, test, note): unbatched (image, mask), uint8 [height, width, 3] and the
      classes, uint8 [height, width, 1], of known cardinality, in a fixed order; and
      what a reader should know of the masks, which may be nothing.

    Raises:
      DataError: If the data are missing; or a file has no partner, is no image or no
        such mask, or has another size. Nothing is left out.
      ValueError: If a setting is invalid.
    """
    settings, limit = config.data, config.limit_examples
    if settings.name == "digits":
        parts = _write_digits(settings.image_size, settings.classes, limit)
    elif settings.name == "folder":
        parts = _read_folder(settings, config.data_dir, limit)
    elif config.manual_dir and any(
        pathlib.Path(config.manual_dir, name).is_dir()
        for name in ("masks", "train/masks")
    ):
        parts = _read_folder(settings, config.manual_dir, limit)
    else:
        return _load_tfds(config)
    note = ""
    if settings.classes == 2:
        share = float(np.mean(parts[1][1]))
        note = (
            f"foreground {share:.3f} of the test pixels (all foreground: Dice "
            f"{2 * share / (1 + share):.2f})"
        )
    return *map(data.slices, parts), note


# The next two return (train, test), each (images, masks): uint8 [examples, height,
# width, 3 and 1].


def _write_digits(size, classes, limit):
    """Writes scikit-learn's real digits on patches of its two photographs.

    Each of the 1797 digits is enlarged to half the image's side and set at a random
    place of a random patch, in white on a dark patch and in black on a bright one. The
    mask is where the ink covers more than half: 1, or of 11 classes the digit and 1.
    The test split has other digits, and patches of other parts of the photographs. The
    same in every run; no download.
    """
    if classes not in (2, 11) or size is None or not 8 <= size <= 128:
        raise ValueError(
            "Digits on photographs have 2 or 11 classes and a side of 8 to 128. "
            f"Received: config.data.classes={classes}, config.data.image_size={size}."
        )
    extras.require("PIL")  # scikit-learn reads the photographs by it.
    datasets = extras.require("sklearn.datasets")
    *digits, _ = images_data.load_digits(size // 2)
    photographs = datasets.load_sample_images().images
    border = round(photographs[0].shape[1] * _TRAIN_SHARE)
    areas = ([p[:, :border] for p in photographs], [p[:, border:] for p in photographs])
    rng, parts = np.random.default_rng(_SEED), []
    for split, area in zip(digits, areas, strict=True):
        images, masks = [], []
        for digit, label in split.take(limit or -1).as_numpy_iterator():
            patch = _cut(rng, area[rng.integers(len(area))], size).astype("float32")
            ink = np.zeros((size, size, 1), "float32")
            _cut(rng, ink, len(digit))[:] = digit / 255
            color = 255 if patch.mean() < 128 else 0
            images.append(np.rint(patch + ink * (color - patch)).astype("uint8"))
            number = 1 if classes == 2 else 1 + label
            masks.append(np.where(ink > 0.5, number, 0).astype("uint8"))
        parts.append((np.stack(images), np.stack(masks)))
    return parts


def _cut(rng, image, size):
    """Returns a random square of an image, not copied."""
    row, column = (rng.integers(side - size + 1) for side in image.shape[:2])
    return image[row : row + size, column : column + size]


def _read_folder(settings, folder, limit):
    """Reads images and masks as `load` says."""
    if not folder or not pathlib.Path(folder).is_dir():
        raise errors.DataError(
            "This task reads a folder of images and masks. Pass --data_dir=FOLDER with "
            f"{_LAYOUT}. Received: {folder!r}."
        )
    root = pathlib.Path(folder)
    if (root / "train").is_dir() and not (root / "images").is_dir():
        parts = [_find_pairs(root / "train"), _find_pairs(root / "test")]
    else:
        pairs = _find_pairs(root)
        held = max(round(settings.test_fraction * len(pairs)), 1)
        parts = [pairs[held:], pairs[:held]]
    if not all(parts):
        raise errors.DataError(f"{root} has too few images to hold some out.")
    examples = [[_read(*p, settings) for p in part[: limit or None]] for part in parts]
    shapes = {image.shape for part in examples for image, _ in part}
    if len(shapes) > 1:
        raise errors.DataError(
            f"{root} has images of {len(shapes)} sizes: {sorted(shapes)[:5]}. Set "
            "config.data.image_size=256, for example, to resize them."
        )
    return [tuple(map(np.stack, zip(*part, strict=True))) for part in examples]


def _find_pairs(folder):
    """Returns (image, mask) of one folder, in an order that names do not decide."""
    images, masks = (
        {path.stem: path for path in sorted((folder / name).glob("[!.]*"))}
        for name in ("images", "masks")
    )
    alone = sorted(images.keys() ^ masks.keys())
    if alone or not images:
        raise errors.DataError(
            f"{folder} has {len(images)} images and {len(masks)} masks; without a "
            f"partner: {', '.join(alone[:5]) or '-'}. Expected {_LAYOUT}."
        )
    stems = np.random.default_rng(_SEED).permutation([*images])
    return [(images[stem], masks[stem]) for stem in stems]


def _read(image_path, mask_path, settings):
    """Returns an image and its mask as they train."""
    image, mask, classes = _open(image_path), _open(mask_path), settings.classes
    if image.mode[0] in "IF":
        raise errors.DataError(f"{image_path} has 16 bits a channel. Expected 8.")
    if image.size != mask.size:
        raise errors.DataError(f"{mask_path} is {mask.size}, its image {image.size}.")
    # Of several classes the levels are numbers, which JPEG and colors do not keep.
    modes = ("1", "L", "P", "RGB") if classes == 2 else ("L", "P")
    lossy = classes > 2 and mask_path.suffix.lower() in (".jpg", ".jpeg")
    if mask.mode not in modes or lossy:
        raise errors.DataError(
            f"{mask_path} is not a mask. Received: mode {mask.mode} of Pillow. "
            "Expected 8-bit gray levels, as PNG, without an alpha channel."
        )
    if classes == 2:
        levels, allowed = np.asarray(mask.convert("L")), [{0, 1}, {0, 255}]
        numbers = np.minimum(levels, 1)
    else:
        levels, first = np.asarray(mask), settings.first_class
        allowed, numbers = [{*range(first, first + classes)}], levels - first
    unique_levels = {*np.unique(levels).tolist()}
    if not any(unique_levels <= values for values in allowed):
        raise errors.DataError(
            f"{mask_path} has the values {sorted(unique_levels)[:20]}. Expected "
            f"{' or '.join(map(str, allowed))}; see config.data.classes."
        )
    image = np.asarray(image.convert("RGB"))
    return _resize(image, numbers.astype("uint8")[..., None], settings.image_size)


def read_image(path, settings) -> np.ndarray:
    """Returns an image as those that train: uint8 [height, width, 3]."""
    image = np.asarray(_open(path).convert("RGB"))
    return np.asarray(_resize(image, image[..., :1], settings.image_size)[0])


def _open(path):
    """Returns a picture as a viewer shows it, turned."""
    Image = extras.require("PIL.Image")
    ImageOps = extras.require("PIL.ImageOps")
    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image)
    except (OSError, SyntaxError, ValueError) as e:  # As Pillow's readers raise.
        raise errors.DataError(f"{path} is not an image: {e}") from e


def _resize(image, mask, size):
    """Returns both as squares of a size; None: as they are."""
    if size is None or tuple(image.shape[:2]) == (size, size):
        return image, mask
    image = tf.image.resize(image, (size, size), antialias=True)
    image = tf.cast(tf.clip_by_value(tf.round(image), 0, 255), tf.uint8)
    # The nearest pixel, which mixes no classes.
    return image, tf.image.resize(mask, (size, size), method="nearest")


def _load_tfds(config):
    """Returns the splits train and test of a TFDS data set, resized."""
    settings, side = config.data, config.data.image_size
    if side is None:
        raise ValueError(
            "Images of a TFDS data set differ in size. Received: config.data.image_size"
            f"=None, config.data.name={settings.name!r}. Set it: 128, for example."
        )
    try:
        builder = data.prepared_builder(config)
    except errors.DataError as e:
        raise errors.DataError(f"{e} --manual_dir may also have {_LAYOUT}.") from e
    features, splits = builder.info.features, builder.info.splits
    if not {"image", settings.mask_feature} <= {*features} or "test" not in splits:
        raise errors.DataError(
            f"Data set {settings.name!r} lacks an image, a mask or a split. Received: "
            f"features {', '.join(features)}; splits {', '.join(splits)}. Expected "
            f"image, {settings.mask_feature} (config.data.mask_feature); train, test."
        )

    def prepare(example):
        mask = tf.cast(example[settings.mask_feature], tf.int32) - settings.first_class
        in_range = tf.reduce_all((mask >= 0) & (mask < settings.classes))
        expected = (
            f"Masks have classes {settings.first_class} and on, {settings.classes} of "
            "them: see config.data.first_class and config.data.classes."
        )
        tf.debugging.Assert(in_range, [expected])
        image, mask = _resize(example["image"], tf.cast(mask, tf.uint8), side)
        image = tf.ensure_shape(image, (side, side, 3))
        return image, tf.ensure_shape(mask, (side, side, 1))

    train, test = (
        builder.as_dataset(split=split)
        .take(config.limit_examples or -1)
        .map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
        for split in ("train", "test")
    )
    return train, test, ""
