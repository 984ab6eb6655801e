"""What tasks share of their data: parts of a data set, and TFDS."""

import os
import pathlib
import socket

import tensorflow as tf

from tfamp import errors

_TFDS_HOST = "storage.googleapis.com"
BATCHES = 8  # Different ones of a `tasks.Synthetic`, again and again.


def hold_out(dataset: tf.data.Dataset, fraction: float):
    """Splits off the last part of a dataset of known cardinality.

    Args:
      dataset: Examples in a fixed order that does not depend on the label.
      fraction: Share in (0, 1) of the second part.

    Returns:
      (first part, second part), both of known cardinality and not empty.

    Raises:
      ValueError: If the fraction is not in (0, 1).
      DataError: If there are fewer than two examples.
    """
    if not 0 < fraction < 1:
        raise ValueError(
            "`validation_fraction` must be in (0, 1). "
            f"Received: validation_fraction={fraction}."
        )
    total = int(dataset.cardinality())
    if total < 2:
        raise errors.DataError(
            f"Too few examples to hold some out. Received: {total}. Expected 2 or more."
        )
    held = min(max(1, round(total * fraction)), total - 1)
    return dataset.take(total - held), dataset.skip(total - held)


def limit(dataset: tf.data.Dataset, examples: int) -> tf.data.Dataset:
    """Returns the first so many examples; all of them for 0."""
    return dataset.take(examples) if examples else dataset


def repeat(features, labels) -> tf.data.Dataset:
    """Returns an endless dataset of batches, for a `tasks.Synthetic`.

    Args:
      features: Arrays [batches, batch, ...], or a dict of such.
      labels: The same.
    """
    batches = tf.data.Dataset.from_tensor_slices((features, labels))
    return batches.repeat().prefetch(tf.data.AUTOTUNE)


def load_tfds(
    name: str, data_dir: str | None, manual_dir: str | None
) -> tuple[tf.data.Dataset, tf.data.Dataset, int]:
    """Loads a supervised data set of TFDS, preparing it if that can work.

    Args:
      name: Name in TFDS, e.g. "mnist".
      data_dir: Folder of prepared data; None for TFDS' own default.
      manual_dir: Folder with the original files, for hosts without a network.

    Returns:
      (train, test, number of classes): unbatched (features, label), in a fixed
      order.

    Raises:
      DataError: If the data set is unknown, not prepared with no way to prepare
        it, has other files than expected, or no supervised classes.
    """
    builder = prepared_builder(name, data_dir, manual_dir)
    keys = builder.info.supervised_keys
    if not keys or not {"train", "test"} <= set(builder.info.splits):
        raise errors.DataError(
            f"Data set {name!r} has no supervised keys, or no train and test splits. "
            f"Received: keys {keys}, splits {sorted(builder.info.splits)}."
        )
    train, test = (
        builder.as_dataset(split=split, as_supervised=True, shuffle_files=False)
        for split in ("train", "test")
    )
    return train, test, builder.info.features[keys[1]].num_classes


def is_text(feature) -> bool:
    """Returns whether a feature of TFDS is a single string."""
    return feature.shape == () and feature.tf_dtype == tf.string


def describe_feature(feature) -> str:
    """Returns a feature of TFDS in one short line."""
    return " ".join(str(feature).split())[:100]


def prepared_builder(name: str, data_dir: str | None, manual_dir: str | None):
    """Returns the TFDS builder of a data set, which is prepared if that can work.

    Args:
      name: Name in TFDS, e.g. "glue/sst2".
      data_dir: Folder of prepared data; None for TFDS' own default.
      manual_dir: Folder with the original files, for hosts without a network.

    Returns:
      A `tfds.core.DatasetBuilder` whose data are on disk.

    Raises:
      DataError: If the data set is unknown, or not prepared with no way to prepare
        it, or its files are others than expected.
      ImportError: If TFDS is missing.
    """
    try:
        import tensorflow_datasets as tfds
    except ImportError as e:
        raise ImportError('Install TFDS: pip install "tfamp[data]".') from e
    try:
        builder = tfds.builder(name, data_dir=data_dir or None)
    except (tfds.core.registered.DatasetNotFoundError, ValueError) as e:
        raise errors.DataError(
            f"Unknown data set. Received: config.data.name={name!r}. Expected a name "
            "from https://www.tensorflow.org/datasets/catalog, or of a set in "
            f"--data_dir{f' ({data_dir} has none of that name)' if data_dir else ''}."
        ) from e
    if not builder.is_prepared():
        _prepare(tfds, builder, name, manual_dir)
    return builder


def _prepare(tfds, builder, name, manual_dir):
    """Downloads and prepares, or says at once why that cannot work.

    Without a network TFDS retries for more than three minutes first.
    """
    folder = builder.data_dir
    online = resolves(_TFDS_HOST)
    if manual_dir:
        _check_manual_files(builder, manual_dir, online)
    elif not online:
        raise errors.DataError(
            f"Data set {name!r} is not prepared in {folder}, and {_TFDS_HOST} cannot "
            "be reached to download it. Pass --manual_dir with the original files, "
            "or --data_dir with a folder prepared by TFDS on another host."
        )
    from tensorflow_datasets.core.download import download_manager, extractor

    known = (
        AssertionError,
        OSError,
        tfds.download.DownloadError,
        download_manager.NonMatchingChecksumError,
        extractor.ExtractError,
    )
    config = tfds.download.DownloadConfig(manual_dir=manual_dir or None)
    try:
        builder.download_and_prepare(download_config=config)
    except known as e:
        reason = str(e).strip().splitlines()[0]
        raise errors.DataError(
            f"Cannot prepare {name!r} in {folder} from {manual_dir or 'the network'}: "
            f"{type(e).__name__}: {reason}"
        ) from e


def _check_manual_files(builder, manual_dir, online):
    """Refuses a folder without the files, which TFDS would try to download."""
    if not os.path.isdir(manual_dir):
        raise errors.DataError(
            f"`manual_dir` must be a folder. Received: {manual_dir!r}."
        )
    names = sorted({info.filename for info in builder.url_infos.values()})
    missing = [n for n in names if not pathlib.Path(manual_dir, n).exists()]
    # A builder with several configs registers the files of all of them.
    enough = len(missing) < len(names) if builder.builder_config else not missing
    if names and not enough and not online:
        raise errors.DataError(
            f"`manual_dir` lacks files of {builder.info.name!r}, and {_TFDS_HOST} "
            f"cannot be reached. Received: {manual_dir!r}. Missing: "
            f"{', '.join(missing[:5])}."
        )


def resolves(host: str) -> bool:
    """Returns whether a host name resolves: whether there is a network at all."""
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True
