"""What tasks share of their data: parts of a data set, TFDS, tables in files."""

import csv
import glob
import os
import pathlib
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from ml_collections import config_dict

from tfamp import errors, extras
from tfamp.runs import pipeline, results

if TYPE_CHECKING:
    import pandas

_TFDS_HOST = "storage.googleapis.com"
_LINES = 5  # Bad rows that an error lists.
_MANY = 20  # Names that an error lists.
ROW = "file and row"  # The column of where a row is from.


def hold_out(dataset: tf.data.Dataset, fraction: float):
    """Splits off the last part of a dataset of known cardinality.

    Args:
      dataset: Examples in a fixed order that does not depend on the label.
      fraction: Share in [0, 1) of the second part.

    Returns:
      (first part, second part), both of known cardinality and not empty; for a
      fraction of 0 (dataset, None).

    Raises:
      DataError: If there are fewer than two examples.
    """
    if not fraction:
        return dataset, None
    total = int(dataset.cardinality())
    if total < 2:
        raise errors.DataError(
            f"Too few examples to hold some out. Received: {total}. Expected 2 or more."
        )
    held = min(max(1, round(total * fraction)), total - 1)
    return dataset.take(total - held), dataset.skip(total - held)


def describe_sizes(train, validation, test) -> str:
    """Returns how many examples the datasets of a task have, as a report says it."""
    sizes = (int(x.cardinality()) if x else 0 for x in (train, validation, test))
    return "{} training, {} validation, {} test examples".format(*sizes)


def slices(arrays: Any) -> tf.data.Dataset:
    """Returns a dataset of arrays, which stay in the host's memory.

    TensorFlow would copy them to the GPU if there is one.

    Args:
      arrays: As for `tf.data.Dataset.from_tensor_slices`.
    """
    with tf.device("CPU:0"):
        return tf.data.Dataset.from_tensor_slices(arrays)


def repeat(features, labels) -> tf.data.Dataset:
    """Returns an endless dataset of batches, for a `tasks.Synthetic`.

    Args:
      features: Arrays [batches, batch, ...], or a dict of such.
      labels: The same.
    """
    return slices((features, labels)).repeat().prefetch(tf.data.AUTOTUNE)


def predict(
    model: keras.Model, inputs: Any, config: config_dict.ConfigDict
) -> np.ndarray:
    """Returns a model's outputs for the examples of arrays, in batches.

    Args:
      model: A trained model.
      inputs: Arrays, as for `slices`.
      config: Its `eval_batch_size` counts.
    """
    batches = pipeline.evaluation_batches(slices(inputs), config.eval_batch_size)
    # A bar on a terminal; a file has the trainer's lines.
    return model.predict(batches, verbose=1 if sys.stdout.isatty() else 0)


def answers(logits: np.ndarray, classes: Sequence[str]) -> dict[str, list[Any]]:
    """Returns columns for a person: each row's likeliest class, and how likely it is.

    In float64: the same on every machine. A run that diverged knows no probability.

    Args:
      logits: Float [rows, classes].
      classes: Their names.
    """
    likely = tf.nn.softmax(logits.astype("float64")).numpy().max(axis=1).round(6)
    return {
        "prediction": [classes[label] for label in logits.argmax(axis=1)],
        "probability": [results.json_number(float(share)) for share in likely],
    }


def prepared_builder(config: config_dict.ConfigDict):
    """Returns the TFDS builder of a data set, which is prepared if that can work.

    Args:
      config: `config.data.name` is the name in TFDS, e.g. "glue/sst2";
        `config.data_dir` the folder of prepared data, "" for TFDS' own default;
        `config.manual_dir` that of the original files, for hosts without a network.

    Returns:
      A `tfds.core.DatasetBuilder` whose data are on disk.

    Raises:
      DataError: If the data set is unknown, or not prepared with no way to prepare
        it, or its files are others than expected.
      ImportError: If TFDS is missing.
    """
    tfds = extras.require("tensorflow_datasets")
    name, data_dir = config.data.name, config.data_dir
    try:
        builder = tfds.builder(name, data_dir=data_dir or None)
    except (tfds.core.registered.DatasetNotFoundError, ValueError) as e:
        raise errors.DataError(
            f"Unknown data set. Received: config.data.name={name!r}. Expected a name "
            "from https://www.tensorflow.org/datasets/catalog, or of a set in "
            f"--data_dir{f' ({data_dir} has none of that name)' if data_dir else ''}."
        ) from e
    if not builder.is_prepared():
        _prepare(tfds, builder, name, config.manual_dir or None)
    return builder


def _prepare(tfds, builder, name, manual_dir):
    """Downloads and prepares, or says at once why that cannot work."""
    # Without a network TFDS retries for more than three minutes first.
    if not resolves(_TFDS_HOST):
        _require_manual_files(builder, name, manual_dir)
    config = tfds.download.DownloadConfig(manual_dir=manual_dir)
    try:
        builder.download_and_prepare(download_config=config)
    except Exception as e:  # Of a dozen classes, by data set and step.
        raise errors.DataError(
            f"Cannot prepare {name!r} in {builder.data_dir} from "
            f"{manual_dir or 'the network'}: {type(e).__name__}: {e}"
        ) from e


def _require_manual_files(builder, name, manual_dir):
    """Refuses a folder without the files, which TFDS would try to download."""
    names = sorted({info.filename for info in builder.url_infos.values()})
    there = [n for n in names if manual_dir and pathlib.Path(manual_dir, n).exists()]
    # A builder with several configs registers the files of all of them.
    enough = there if builder.builder_config else len(there) == len(names)
    if not manual_dir or (names and not enough):
        missing = [n for n in names if n not in there][:5]
        raise errors.DataError(
            f"Data set {name!r} is not prepared in {builder.data_dir}, and {_TFDS_HOST}"
            f" cannot be reached to download it. Received: manual_dir={manual_dir!r}, "
            f"which lacks {', '.join(missing) or 'its files'}. Pass --manual_dir with "
            "the original files, or --data_dir with a folder prepared by TFDS on "
            "another host."
        )


def resolves(host: str) -> bool:
    """Returns whether a host name resolves: whether there is a network at all."""
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


# ---- Files ----


def read_table(
    data: config_dict.ConfigDict,
    path: str | os.PathLike,
    columns: Sequence[str],
    **keywords: Any,
):
    """Reads some columns of one CSV or TSV file as strings, "" where there is none.

    Args:
      data: `delimiter`, `header` and `quoted` say how it is written.
      path: The file.
      columns: Names in the header; without one positions from "0".
      **keywords: Of `pandas.read_csv`.

    Returns:
      A table of the columns, in this order, without spaces around their texts; its
      index is the row in the file.

    Raises:
      DataError: If it cannot be read, or lacks a column.
    """
    pandas = extras.require("pandas")
    # Words such as "NA" and "null" are text. Where nothing is quoted, a line ends at
    # "\n" alone: texts hold other separators, and quotes.
    try:
        table = pandas.read_csv(
            path,
            dtype=str,
            keep_default_na=False,
            encoding="utf-8-sig",
            sep=data.delimiter.replace(r"\t", "\t"),
            header=0 if data.header else None,
            quoting=csv.QUOTE_MINIMAL if data.quoted else csv.QUOTE_NONE,
            lineterminator=None if data.quoted else "\n",
            **keywords,
        )
    except (OSError, ValueError) as error:  # pandas' own are ValueErrors.
        reason = " ".join(str(error).split())
        reason += "; save it as UTF-8" * isinstance(error, UnicodeError)
        raise errors.DataError(f"{path} cannot be read: {reason}.") from error
    table.columns = [str(column).strip() for column in table.columns]
    missing = [column for column in columns if column not in table.columns]
    if missing:
        raise errors.DataError(
            f"{path} has no column {', '.join(map(repr, missing))}. Found: "
            f"{', '.join(map(repr, table.columns))}. Correct the file, or set the "
            "columns in config.data."
        )
    if not isinstance(table.index, pandas.RangeIndex):  # Else they shift by one.
        raise errors.DataError(f"{path} has rows with more fields than its header.")
    table.index += 1 + bool(data.header)
    return table[list(columns)].fillna("").apply(lambda column: column.str.strip())


def pick(rows: "pandas.DataFrame", columns: Sequence[str]) -> "pandas.DataFrame":
    """Returns some columns of rows that are to be predicted.

    Raises:
      DataError: If one is missing.
    """
    if missing := [name for name in columns if name not in rows]:
        raise errors.DataError(
            f"The rows have no column {', '.join(map(repr, missing))}. Found: "
            f"{', '.join(map(repr, rows.columns))}. Expected the columns of the data "
            "that the run was trained on."
        )
    return rows[list(columns)]


def find_files(data_dir: str, pattern: str) -> list[str]:
    """Returns the paths of a file, or of a pattern such as "*.txt", in a folder.

    Raises:
      DataError: If there is none.
    """
    names = [pattern] if os.path.isfile(os.path.join(data_dir, pattern)) else []
    # Not of the joined path: a folder's name is no pattern.
    names = names or sorted(glob.glob(pattern, root_dir=data_dir))
    if not names:
        raise errors.DataError(
            f"No file {pattern} in the folder {data_dir!r}. Pass the folder that holds "
            "it, --data_dir=FOLDER, or set the files in config.data."
        )
    return [os.path.join(data_dir, name) for name in names]


def read_files(
    data: config_dict.ConfigDict,
    folder: str,
    pattern: str,
    columns: Sequence[Any],
    read: Callable[..., "pandas.DataFrame"] = read_table,
) -> "pandas.DataFrame":
    """Reads some columns of a file, or of all files that match a pattern.

    Args:
      data, columns: As in `read_table`.
      folder: Folder of the files.
      pattern: As in `find_files`.
      read: What reads one of them; as `read_table`.

    Returns:
      A table of the columns, and last `ROW`.
    """
    pandas, tables = extras.require("pandas"), []
    for path in find_files(folder, pattern):
        table = read(data, path, columns)
        places = [f"{path}, row {number}" for number in table.index]
        tables.append(table.assign(**{ROW: places}))
    return pandas.concat(tables, ignore_index=True)


def report_bad_rows(bad: Sequence[str], on_bad_rows: str, notes: list[str]) -> None:
    """Raises for bad rows, or notes how many are left out.

    Args:
      bad: A line for each of them.
      on_bad_rows: "raise" or "skip".
      notes: Gets a line for the report.

    Raises:
      DataError: If there are any, for "raise".
    """
    if bad and on_bad_rows != "skip":
        more = f"; and {len(bad) - _LINES} more" if len(bad) > _LINES else ""
        raise errors.DataError(
            f"{len(bad)} bad row(s). {'; '.join(bad[:_LINES])}{more}. Correct the "
            "file, or leave such rows out with config.data.on_bad_rows='skip'."
        )
    notes += [f"{len(bad)} bad row(s) skipped"] if bad else []


def list_names(names: Sequence[object]) -> str:
    """Returns up to twenty names, such as those of classes, and how many there are."""
    more = f", ... ({len(names)})" if len(names) > _MANY else ""
    return ", ".join(map(str, names[:_MANY])) + more
