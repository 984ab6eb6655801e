"""Images and masks of a folder, decoded once, with what is wrong in each file."""

import pathlib
import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfamp import errors
from tfamp.training import tables

_SUFFIXES = (".jpeg", ".jpg", ".png")
_SEED = 0  # Of what is held out: the same examples in every run.
_PNG = b"\x89PNG\r\n\x1a\n"
_GRAY, _PALETTE, _WITH_ALPHA = 0, 3, (4, 6)  # Color types of PNG.
_JPEG = b"\xff\xd8"
_SCAN, _APP1 = 0xDA, 0xE1  # Markers of JPEG: of the pixels, of Exif.
_ORIENTATION = 0x0112  # Tag of Exif.


class Examples(NamedTuple):
    """Images and masks of one split.

    Attributes:
      images: uint8 [examples, height, width, 3].
      masks: uint8 [examples, height, width, 1]; classes.
    """

    images: np.ndarray
    masks: np.ndarray


class _Pair(NamedTuple):
    """The files of an example."""

    image: pathlib.Path
    mask: pathlib.Path


def read(settings, data_dir: str | None, limit: int = 0) -> tuple[Examples, Examples]:
    """Reads DATA/images/NAME.png and DATA/masks/NAME.png, or .jpg.

    A share of the names is held out, the same in every run; or DATA/train and DATA/test
    each have folders of images and masks. A mask of two classes has the values 0 and
    255, or 0 and 1; one of several has the numbers of the classes as gray levels. What
    TensorFlow would decode to other pixels than a viewer shows is an error.

    Args:
      settings: `config.data`: classes, image_size and test_fraction.
      data_dir: The folder.
      limit: Examples of each split; 0: all.

    Returns:
      (train, test), in an order that does not depend on the names.

    Raises:
      DataError: If there is no such folder, a file has no partner, is no image or no
        such mask, has 16 bits a channel or is to be turned, or sizes differ.
        Nothing is left out.
    """
    train, test = _find_splits(data_dir, settings.test_fraction)
    parts = [pairs[:limit] if limit else pairs for pairs in (train, test)]
    found = [[*_decode_all(pairs, settings)] for pairs in parts]
    problems = [each for part in found for each in part if isinstance(each, str)]
    _raise_for(problems, data_dir)
    shapes = {
        example[0].shape: pair.image
        for pairs, part in zip(parts, found, strict=True)
        for pair, example in zip(pairs, part, strict=True)
    }
    if len(shapes) > 1:
        sizes = [f"{p.name}: {s[0]}x{s[1]}" for s, p in shapes.items()]
        raise errors.DataError(
            f"{data_dir} has images of {len(sizes)} sizes: {tables.list_lines(sizes)}. "
            "Set config.data.image_size=256, for example, to resize them."
        )
    train, test = (Examples(*map(np.stack, zip(*part, strict=True))) for part in found)
    return train, test


def _raise_for(problems, folder):
    if problems:
        raise errors.DataError(
            f"{len(problems)} problem(s) in {folder}: {tables.list_lines(problems)}."
        )


def _find_splits(data_dir, fraction):
    """Returns the pairs of train and test, in a fixed random order."""
    if not data_dir or not pathlib.Path(data_dir).is_dir():
        raise errors.DataError(
            "This task reads a folder of images and masks. Pass --data_dir=FOLDER with "
            f"the folders images and masks. Received: {data_dir!r}."
        )
    root = pathlib.Path(data_dir)
    order = np.random.default_rng(_SEED).permutation
    if not (root / "images").is_dir() and (root / "train").is_dir():
        parts = [_find_pairs(root / name) for name in ("train", "test")]
        return [[pairs[i] for i in order(len(pairs))] for pairs in parts]
    pairs = _find_pairs(root)
    if len(pairs) < 2:
        raise errors.DataError(
            f"{root} has 1 image, of which none can be held out. Expected 2 or more."
        )
    pairs = [pairs[i] for i in order(len(pairs))]
    held = min(max(round(fraction * len(pairs)), 1), len(pairs) - 1)
    return pairs[held:], pairs[:held]


def _find_pairs(folder) -> list[_Pair]:
    """Returns the pairs of one folder, by name."""
    images, masks = ({}, {})
    problems: list[str] = []
    for name, files in (("images", images), ("masks", masks)):
        if not (folder / name).is_dir():
            raise errors.DataError(
                f"There is no folder {folder / name}. Expected images and masks of the "
                "same names in DATA/images and DATA/masks, or in DATA/train and "
                "DATA/test such folders."
            )
        for path in sorted((folder / name).glob("[!.]*")):
            if path.suffix.lower() not in _SUFFIXES:
                problems.append(f"{name}/{path.name}: not {' or '.join(_SUFFIXES)}")
            elif path.stem in files:
                problems.append(f"{name}/{path.name}: as {files[path.stem].name}")
            else:
                files[path.stem] = path
    for one, other, kind in ((images, masks, "mask"), (masks, images, "image")):
        missing = [path for stem, path in one.items() if stem not in other]
        problems += [f"{p.parent.name}/{p.name} has no {kind}" for p in missing]
    if not images and not problems:
        problems = [f"no images ({', '.join(_SUFFIXES)})"]
    _raise_for(problems, folder)
    return [_Pair(path, masks[stem]) for stem, path in images.items()]


def _decode_all(pairs, settings) -> Iterator[tuple[np.ndarray, np.ndarray] | str]:
    """Yields each image and its mask, or a line on what is wrong with them."""
    for pair in pairs:
        try:
            image = _decode(pair.image, 3)
            mask = _decode(pair.mask, 1, settings.classes)
            mask = _to_classes(pair.mask, mask, settings.classes)
        except ValueError as problem:
            yield str(problem)
            continue
        if image.shape[:2] != mask.shape[:2]:
            height, width = mask.shape[:2]
            yield (
                f"masks/{pair.mask.name} is {height}x{width}, its image "
                f"{image.shape[0]}x{image.shape[1]}"
            )
        else:
            yield resize(image, mask, settings.image_size)


def resize(image, mask, size: int | None):
    """Returns an image and its mask as squares of a size; None: as they are.

    Args:
      image: uint8 [height, width, channels]; resized bilinearly.
      mask: [height, width, 1]; resized to the nearest pixel, which mixes no classes.
      size: Side.

    Returns:
      (image, mask) of the same dtypes: tensors, or what was given.
    """
    if size is None or tuple(image.shape[:2]) == (size, size):
        return image, mask
    image = tf.image.resize(image, (size, size), antialias=True)
    image = tf.cast(tf.clip_by_value(tf.round(image), 0, 255), tf.uint8)
    return image, tf.image.resize(mask, (size, size), method="nearest")


def _decode(path, channels, classes=None) -> np.ndarray:
    """Returns uint8 [height, width, channels]; ValueError says what is wrong.

    Args:
      path: The file.
      channels: 3, or 1.
      classes: Of a mask; None: an image.
    """
    name = f"{path.parent.name}/{path.name}"
    try:
        contents = path.read_bytes()
        image = tf.io.decode_image(contents, channels, expand_animations=False)
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}") from error
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(f"{name}: not an image") from error
    problem = _find_problem(contents, classes)
    if problem:
        raise ValueError(f"{name}: {problem}")
    return image.numpy()


def _find_problem(contents, classes) -> str | None:
    """Returns what a file's header says that decoding it passes over in silence."""
    depth = color = None
    if contents.startswith(_PNG):
        depth, color = contents[24:26]
    if depth == 16:  # Decoded to the high byte: 0 for the classes of a mask.
        return "16 bits a channel; expected 8. Convert it"
    if classes and color in _WITH_ALPHA:
        return "has an alpha channel; save the mask as gray levels"
    if classes and color == _PALETTE:
        return "has a palette; save the mask as gray levels"
    # What TensorFlow decodes of other files are colors or stretched levels.
    if classes and classes > 2 and (depth, color) != (8, _GRAY):
        return "no PNG of 8-bit gray levels, one for each class"
    orientation = _read_orientation(contents)
    if orientation != 1:  # Viewers turn it, decoding does not.
        return f"EXIF orientation {orientation}: save the image turned"
    return None


def _read_orientation(contents) -> int:
    """Returns how a JPEG file's pixels are to be turned: 2 to 8; 1: they are not.

    References:
      - [Exif 2.32, 4.5 and 4.6](https://www.cipa.jp/std/documents/e/DC-X008-Translation-2019-E.pdf)
    """
    start = len(_JPEG)
    if not contents.startswith(_JPEG):
        return 1
    try:
        while contents[start] == 0xFF and contents[start + 1] != _SCAN:
            if contents[start + 1] == 0xFF:  # Padding.
                start += 1
                continue
            (size,) = struct.unpack_from(">H", contents, start + 2)
            segment = contents[start + 4 : start + 2 + size]
            if contents[start + 1] == _APP1 and segment.startswith(b"Exif\0\0"):
                return _find_orientation(segment[6:])
            start += 2 + size
    except (struct.error, IndexError):  # Of no use to a viewer either.
        pass
    return 1


def _find_orientation(tiff) -> int:
    """Returns the orientation in the first directory of Exif's TIFF; 1: none."""
    order = "<" if tiff.startswith(b"II") else ">"
    (start,) = struct.unpack_from(f"{order}I", tiff, 4)
    (count,) = struct.unpack_from(f"{order}H", tiff, start)
    for entry in range(start + 2, start + 2 + 12 * count, 12):
        tag, _, _, value = struct.unpack_from(f"{order}HHIH", tiff, entry)
        if tag == _ORIENTATION:
            return value if 1 <= value <= 8 else 1
    return 1


def _to_classes(path, mask, classes):
    """Returns a mask of classes 0, 1, ...; ValueError says what is wrong."""
    name, found = f"masks/{path.name}", np.flatnonzero(np.bincount(mask.ravel()))
    if classes == 2:
        if set(found) <= {0, 1} or set(found) <= {0, 255}:
            return (mask > 0).astype("uint8")
        raise ValueError(
            f"{name} has the values {tables.list_names(found)}, expected 0 and 255, or "
            "0 and 1"
        )
    if found[-1] >= classes:
        raise ValueError(
            f"{name} has the class {found[-1]}, expected 0 to {classes - 1}"
        )
    return mask
