"""Images with classes: scikit-learn's digits, TFDS, and folders of images by class."""

import functools
import pathlib

import numpy as np
import tensorflow as tf
from ml_collections import config_dict

from tfamp import errors, extras
from tfamp.recipes import data

_SUFFIXES = [".jpeg", ".jpg", ".png", ".JPEG", ".JPG", ".PNG"]
SIDE = 8  # Of the digits as they are.
_HELD_OUT = 0.2  # Of digits, and of a folder without splits of its own.
_LAYOUT = "images in train/CLASS and test/CLASS, or in CLASS"


def load(config: config_dict.ConfigDict):
    """Loads a data set by its name.

    A folder has ROOT/train/CLASS/*.png and ROOT/test/CLASS/*.png, or ROOT/CLASS/*.png,
    of which a fifth of each class is held out, the same in every run. PNG or JPEG, all
    of one size; in color if one is. Hidden files and other endings are no images.

    Args:
      config: `config.data.name` is "digits", of the side `config.data.image_size`, if
        there is one; any name, if `config.manual_dir` has images by class; or one in
        TFDS, whose prepared data `config.data_dir` has, or whose original files
        `config.manual_dir`.

    Returns:
      (train, test, names of the classes, decode): unbatched (uint8 image [height,
      width, channels], integer class), of known cardinality, in a fixed order that does
      not depend on the class. Of a folder they have the files' names, of which `decode`
      makes images; it leaves others as they are.

    Raises:
      DataError: If the data are missing or have no classes; if a class has no image,
        the splits have other classes, or a file is no image or of another size.
    """
    name, folder = config.data.name, pathlib.Path(config.manual_dir)
    if name == "digits":
        return *load_digits(config.data.get("image_size", SIDE)), _keep
    if config.manual_dir and _has_images(folder):
        return _read_folder(folder)
    try:
        builder = data.prepared_builder(config)
    except errors.DataError as e:
        raise errors.DataError(f"{e} --manual_dir may also have {_LAYOUT}.") from e
    keys, splits = builder.info.supervised_keys, ("train", "test")
    if not keys or not set(splits) <= set(builder.info.splits):
        raise errors.DataError(
            f"Data set {name!r} has no supervised keys, or no train and test splits. "
            f"Received: keys {keys}, splits {sorted(builder.info.splits)}."
        )
    parts = (builder.as_dataset(split=split, as_supervised=True) for split in splits)
    return *parts, builder.info.features[keys[1]].names, _keep


def chance(test: tf.data.Dataset, classes: int, decode) -> float:
    """Returns the share of the largest class in the test split of a folder.

    Args:
      test, decode: As `load` returns them.
      classes: Their number. Of other data sets, whose images would be decoded for it,
        all classes are taken to be as frequent.
    """
    if decode is _keep:
        return 1 / classes
    labels = [label for _, label in test.as_numpy_iterator()]
    return float(np.bincount(labels).max() / len(labels))


def load_digits(image_size: int):
    """Loads the 1797 real 8x8 digits that scikit-learn bundles; no download.

    Args:
      image_size: Side of the images, resized bilinearly.

    Returns:
      (train, test, names) as `load` does; one channel, a stratified 80 : 20 split with
      a fixed seed.

    References:
      Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998.
    """
    datasets = extras.require("sklearn.datasets")
    digits = datasets.load_digits()
    images = digits.images[..., None] * (255 / digits.images.max())
    images = tf.image.resize(images, (image_size, image_size))
    images = np.clip(np.rint(images.numpy()), 0, 255).astype("uint8")
    parts = _hold_out(images, digits.target.astype("int64"))
    return *map(data.slices, parts), [*map(str, range(10))]


def _hold_out(examples, labels):
    """Returns (examples, labels) of train and test."""
    model_selection = extras.require("sklearn.model_selection")
    x, x_test, y, y_test = model_selection.train_test_split(
        examples, labels, test_size=_HELD_OUT, random_state=0, stratify=labels
    )
    return (x, y), (x_test, y_test)


def _has_images(root):
    paths = (path for pattern in ("*/*", "*/*/*") for path in root.glob(pattern))
    return any(path.suffix in _SUFFIXES for path in paths)


def _read_folder(root):
    if (root / "train").is_dir():
        train, test = _list_images(root / "train"), _list_images(root / "test")
        if train.target_names != test.target_names:
            raise errors.DataError(
                f"{root} has other classes in train than in test. Received: "
                f"{train.target_names} and {test.target_names}."
            )
        parts = [(part.filenames, part.target) for part in (train, test)]
    else:
        train = _list_images(root)
        parts = _hold_out(train.filenames, train.target)
    shape = _measure([path for paths, _ in parts for path in paths])
    names = map(data.slices, parts)
    return *names, train.target_names, functools.partial(decode, shape=shape)


def _keep(image):
    return image


def decode(path, shape) -> tf.Tensor:
    """Returns the pixels of a PNG or JPEG file of just this shape: uint8."""
    image = tf.io.decode_image(
        tf.io.read_file(path), shape[-1], expand_animations=False
    )
    return tf.ensure_shape(image, shape)


def _list_images(folder):
    """Returns `filenames`, `target` and `target_names` of one split, shuffled."""
    datasets = extras.require("sklearn.datasets")
    classes = [path.name for path in folder.glob("[!.]*") if path.is_dir()]
    listing = datasets.load_files(
        folder,
        categories=classes,
        load_content=False,
        random_state=0,
        allowed_extensions=_SUFFIXES,
    )
    counts = np.bincount(listing.target, minlength=len(classes)) if classes else []
    if len(classes) < 2 or min(counts) < 1:
        raise errors.DataError(
            f"{folder} has, by class, {dict(zip(sorted(classes), counts, strict=True))}"
            f" images. Expected {_LAYOUT}, of each of 2 or more classes."
        )
    return listing


def _measure(paths):
    """Returns (height, width, channels) of all images, from the files' headers."""
    Image = extras.require("PIL.Image")
    sizes, modes = {}, set()
    for path in paths:
        try:
            with Image.open(path) as image:
                sizes.setdefault(image.size, path)
                modes.add(image.mode)
        except OSError as e:
            raise errors.DataError(f"{path} is not an image: {e}") from e
    if len(sizes) > 1:
        shown = "; ".join(f"{p}: {w}x{h}" for (w, h), p in list(sizes.items())[:5])
        raise errors.DataError(
            f"Images of {len(sizes)} sizes: {shown}. Expected one size: resize them."
        )
    ((width, height),) = sizes
    return height, width, 1 if modes <= {"1", "L"} else 3
