"""Folders of images as TFDS examples: one folder for each class."""

import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfamp import errors
from tfamp.training import tables, tfds_folder

_SUFFIXES = (".jpeg", ".jpg", ".png")
_SPLITS = ("train", "test", "validation")


class _Image(NamedTuple):
    """A file and the name of its class."""

    path: pathlib.Path
    label: str


class _Folder(NamedTuple):
    """The images below the folders of classes, and what else there is."""

    images: list[_Image]
    others: list[pathlib.Path]


def read(settings, target: tfds_folder.Target) -> tfds_folder.Source:
    """Reads root/SPLIT/CLASS/*.png, or root/CLASS/*.png and a share to hold out.

    Every file is decoded once before anything is written. Images are color if one is.
    Names that start with "." are hidden: no classes, no images.

    Args:
      settings: `prepare.Settings`; its `source_dir` is the root.
      target: A new name, or a set of TFDS of the features image and label.

    Raises:
      DataError: If there are no such folders, a file is no image, images differ in
        size, or classes or size are not those of the set in TFDS.
    """
    files, others = _find(pathlib.Path(settings.source_dir), settings)
    shapes, problems = _measure([image for part in files.values() for image in part])
    notes = tfds_folder.settle(problems, settings.on_bad_rows)
    if others:
        listed = tables.list_lines(list(map(str, others)))
        notes += (f"{len(others)} other file(s) left out: {listed}",)
    files = {
        split: [image for image in part if image.path in shapes]
        for split, part in files.items()
    }
    classes = _classes(files)
    shape = _common_shape(shapes)
    if target.registered:
        color = shape[-1]
        features, classes, shape = _registered(target, classes, shape)
        if shape[-1] < color:
            notes += (f"color images turned gray, as those of {target.name!r} are",)
    else:
        features = _features(classes, shape)
    splits = {
        split: _Examples(split, part, tuple(classes), shape[-1], tuple(features))
        for split, part in files.items()
    }
    return tfds_folder.Source(splits, features, ("image", "label"), notes)


class _Examples:
    """Decodes images as they are written; a folder may not fit into memory."""

    def __init__(self, split, files, classes, channels, features):
        self.split, self.files, self.classes = split, files, classes
        self.channels, self.features = channels, features

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for number, (path, label) in enumerate(self.files):
            example = {
                "image": _decode(path, self.channels),
                "label": self.classes.index(label),
            }
            if "id" in self.features:
                example["id"] = f"{self.split}_{number:05d}"
            yield example


def _find(root, settings) -> tuple[dict[str, list[_Image]], list[pathlib.Path]]:
    """Returns the images of each split, and what else there is."""
    split_folders = [name for name in _SPLITS if (root / name).is_dir()]
    if split_folders:
        if not {"train", "test"} <= set(split_folders):
            raise errors.DataError(
                f"{root} has the split folder(s) {', '.join(split_folders)}. Expected "
                "train and test; no class may have such a name."
            )
        if settings.validation_fraction:
            raise ValueError(
                f"{root} has folders of splits ({', '.join(split_folders)}): "
                "--validation_fraction has no use."
            )
        found = {name: _list(root / name) for name in split_folders}
        others = [path for folder in found.values() for path in folder.others]
        return {name: folder.images for name, folder in found.items()}, others
    images, others = _list(root)
    if not settings.validation_fraction:
        raise ValueError(
            f"{root} has no folders train and test. Pass --validation_fraction, the "
            "share of each class that is the test split."
        )
    splits = _hold_out(images, settings.validation_fraction, settings.split_seed)
    return splits, others


def _list(folder) -> _Folder:
    """Returns the images of a split, and what else there is."""
    found: list[_Image] = []
    others = [path for path in folder.glob("[!.]*") if not path.is_dir()]
    folders = set()
    for path in sorted(folder.glob("[!.]*/[!.]*")):
        folders.add(path.parent.name)
        if path.is_file() and path.suffix.lower() in _SUFFIXES:
            found.append(_Image(path, path.parent.name))
        else:
            others.append(path)
    classes = {image.label for image in found}
    if len(classes) < 2 or folders - classes:
        without = sorted(folders - classes)
        raise errors.DataError(
            f"{folder} has {len(found)} image(s) ({', '.join(_SUFFIXES)}) in "
            f"{len(classes)} folder(s), none in: {tables.list_names(without) or '-'}. "
            "Expected images in a folder for each of 2 or more classes."
        )
    return _Folder(found, sorted(others))


def _classes(files) -> list[str]:
    """Returns the names of all classes, each of which has to be in "train"."""
    train = {image.label for image in files["train"]}
    for split, images in files.items():
        if unknown := sorted({image.label for image in images} - train):
            raise errors.DataError(
                f"The split {split!r} has the class(es) {tables.list_names(unknown)}, "
                "of which 'train' has no image."
            )
    return sorted(train)


def _hold_out(images: Sequence[_Image], fraction, seed) -> dict[str, list[_Image]]:
    """Splits a share of each class off as "test"."""
    splits: dict[str, list[_Image]] = {"train": [], "test": []}
    rng = np.random.default_rng(seed)
    for label in sorted({image.label for image in images}):
        files = [image for image in images if image.label == label]
        if len(files) < 2:
            raise errors.DataError(
                f"The class {label!r} has 1 image ({files[0].path}), which cannot be "
                "split. Expected 2 or more."
            )
        count = min(max(round(fraction * len(files)), 1), len(files) - 1)
        order = [files[i] for i in rng.permutation(len(files))]
        splits["test"] += order[:count]
        splits["train"] += order[count:]
    return splits


def _measure(images):
    """Returns the shape of each image by its path, and lines on files that are none."""
    shapes, problems = {}, []
    for path, _ in images:
        try:
            shapes[path] = _decode(path, 0).shape
        except tf.errors.InvalidArgumentError as error:
            reason = re.sub(r"\{\{.*?\}\}|\[Op:.*", "", str(error.message), flags=re.S)
            reason = reason.strip(" .")[:120]
            problems.append(f"{path}: not an image: {reason}")
    if not shapes:
        raise errors.DataError(f"No file is an image. {tables.list_lines(problems)}.")
    return shapes, problems


def _decode(path, channels) -> np.ndarray:
    """Returns uint8 [height, width, channels]; 0 channels: as in the file."""
    try:
        contents = path.read_bytes()
    except OSError as error:
        raise errors.DataError(f"Cannot read {path}: {error.strerror}.") from error
    return tf.io.decode_image(contents, channels, expand_animations=False).numpy()


def _common_shape(shapes) -> tuple[int, int, int]:
    """Returns (height, width, channels) of all images; color if one is."""
    sizes: dict[tuple[int, int], pathlib.Path] = {}
    for path, (height, width, _) in shapes.items():
        sizes.setdefault((height, width), path)
    if len(sizes) > 1:
        shown = "; ".join(f"{p}: {h}x{w}" for (h, w), p in list(sizes.items())[:5])
        raise errors.DataError(
            f"Images of {len(sizes)} sizes: {shown}. Expected one size: resize them."
        )
    channels = 1 if all(shape[-1] == 1 for shape in shapes.values()) else 3
    return (*next(iter(sizes)), channels)


def _features(classes, shape):
    """Returns the features of a new set."""
    tfds = tfds_folder.import_tfds()
    return tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=shape),
            "label": tfds.features.ClassLabel(names=classes),
        }
    )


def _registered(target, classes, shape):
    """Returns features, classes in order and shape of a set of TFDS, which must fit."""
    tfds = tfds_folder.import_tfds()
    features = target.registered.info.features
    if not {"image", "label"} <= set(features) <= {"id", "image", "label"}:
        raise errors.DataError(
            f"{target.name!r} has the features {', '.join(features)}. Expected image "
            "and label; choose a new name."
        )
    expected, names = tuple(features["image"].shape), features["label"].names
    channels = expected[-1] or shape[-1]
    if any(e not in (None, s) for e, s in zip(expected[:2], shape[:2], strict=True)):
        raise errors.DataError(
            f"{target.name!r} has images of {expected}. Received: {shape}. Resize "
            "them, or choose a new name."
        )
    unnamed = names == [str(number) for number in range(len(names))]
    if set(classes) <= set(names):
        return features, names, (*shape[:2], channels)
    if not unnamed or len(classes) != len(names):
        raise errors.DataError(
            f"{target.name!r} has the {len(names)} classes {', '.join(names[:20])}. "
            f"Received folders: {', '.join(classes[:20])}. Choose a new name."
        )
    # TFDS reads the names of such a set from its original files, in this order.
    parts = dict(features.items()) | {"label": tfds.features.ClassLabel(names=classes)}
    return tfds.features.FeaturesDict(parts), classes, (*shape[:2], channels)
