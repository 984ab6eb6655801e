"""Text classification data of TFDS: the tasks of GLUE, and any set with texts."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf
from ml_collections import config_dict

from tfamp import errors
from tfamp.training import data, tables, text

_HIDDEN = -1  # TFDS' label of an example whose label is not published.
_BATCH = 1024  # Examples read at a time; one by one they take ten times as long.


class Columns(NamedTuple):
    """Where a data set has its texts, its labels and its test examples.

    Attributes:
      text: Feature of the text.
      second: Feature of the second text of a pair; "" for single texts.
      label: Feature of the class.
      test: Split that is scored; "" if it is held out of the training split.
    """

    text: str
    second: str = ""
    label: str = "label"
    test: str = "validation"  # The labels of GLUE's own test splits are hidden.

    @property
    def features(self) -> tuple[str, ...]:
        """Features of an example: text, second text if there is one, label."""
        return tuple(name for name in self[:3] if name)

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits that are read."""
        return ("train", self.test) if self.test else ("train",)


# https://gluebenchmark.com; stsb is a regression and not here.
GLUE = {
    "glue/cola": Columns("sentence"),
    "glue/mnli": Columns("premise", "hypothesis", test="validation_matched"),
    "glue/mrpc": Columns("sentence1", "sentence2"),
    "glue/qnli": Columns("question", "sentence"),
    "glue/qqp": Columns("question1", "question2"),
    "glue/rte": Columns("sentence1", "sentence2"),
    "glue/sst2": Columns("sentence"),
    "glue/wnli": Columns("sentence1", "sentence2"),
}
_NO_CLASSES = {"glue/stsb": "is a regression", "glue/ax": "hides all its labels"}


def load(
    config: config_dict.ConfigDict, data_dir: str | None, manual_dir: str | None
) -> text.Corpus:
    """Reads a corpus from a prepared TFDS data set, preparing it if that can work.

    Args:
      config: `config.data` has
        name: Name in TFDS. The columns of GLUE's tasks are known, and their validation
          split is the test data.
        text_column, second_text_column, label_column: Features of any other set; its
          test data are its split "test", else "validation", else `test_fraction` of
          the training split.
        on_bad_rows: "raise", or "skip" to leave empty texts out and say how many.
        split_seed: Seed of the splits, apart from the seed of a run.
      data_dir: Folder of prepared data; None for TFDS' own default.
      manual_dir: Folder with the original files.

    Returns:
      A `Corpus`; its classes are those of the label's feature, in its order.

    Raises:
      DataError: If the set is unknown, not prepared with no way to prepare it, has
        other columns, or hides the labels of what is to be scored.
    """
    name = config.data.name
    if reason := _NO_CLASSES.get(name.split(":")[0]):  # Without a version.
        raise errors.DataError(
            f"{name!r} {reason}. Expected a data set with classes: {', '.join(GLUE)}, "
            "or another name in TFDS."
        )
    builder = data.prepared_builder(name, data_dir, manual_dir)
    columns = _find_columns(builder, config)
    read = {split: _read(builder, split, columns) for split in columns.splits}
    names = getattr(builder.info.features[columns.label], "names", None)
    labels = list(range(len(names or ()))) or sorted(
        {row[-1] for row in read["train"]} - {""}
    )
    bad: list[tables.BadRow] = []
    examples = {
        split: _examples(f"{name} {split}", rows, labels, bad)
        for split, rows in read.items()
    }
    tables.handle_bad_rows(bad, config.data.on_bad_rows)
    notes = _notes(builder, columns, bad)
    test = examples.get(columns.test)
    classes = names or [str(label) for label in labels]
    return text.make_corpus(examples["train"], test, classes, config, notes)


def _find_columns(builder, config) -> Columns:
    """Returns the columns of a data set, which has them."""
    splits = set(builder.info.splits)
    names = [builder.name, *filter(None, [getattr(builder.builder_config, "name", "")])]
    columns = GLUE.get("/".join(names))  # Without a version.
    if columns is None:
        test = next((s for s in ("test", "validation") if s in splits), "")
        names = ("text_column", "second_text_column", "label_column")
        columns = Columns(*(config.data[name] for name in names), test)
    features = builder.info.features
    missing = [name for name in columns.features if name not in features]
    if missing:
        raise errors.DataError(
            f"The data set {config.data.name!r} has no feature "
            f"{', '.join(map(repr, missing))}. Found: {', '.join(features)}. Set "
            "config.data.text_column, second_text_column and label_column."
        )
    lost = set(columns.splits) - splits
    if lost:
        raise errors.DataError(
            f"The data set {config.data.name!r} in {builder.data_dir} has no split "
            f"{', '.join(map(repr, sorted(lost)))}. Found: {', '.join(sorted(splits))}."
        )
    _check_kinds(builder, columns)
    return columns


def _check_kinds(builder, columns):
    """Raises unless texts are strings, and the label is a string or an integer."""
    for name in columns.features:
        feature = builder.info.features[name]
        kind, fits = "text", data.is_text(feature)
        if name == columns.label:
            kind = "a class: an integer or a string"
            integer = feature.shape == () and feature.tf_dtype.is_integer
            fits = fits or integer or feature.tf_dtype == tf.bool
        if not fits:
            raise errors.DataError(
                f"The feature {name!r} of {builder.info.full_name} is not {kind}. "
                f"Received: {data.describe_feature(feature)}. Set "
                "config.data.text_column, second_text_column and label_column."
            )


def _read(builder, split, columns) -> list[tuple]:
    """Returns the rows of a split: (text, [second text,] label)."""
    dataset = builder.as_dataset(split=split, shuffle_files=False)
    dataset = dataset.map(lambda e: tuple(e[name] for name in columns.features))
    batches = list(dataset.batch(_BATCH).as_numpy_iterator())
    arrays = [np.concatenate(parts) for parts in zip(*batches, strict=True)]
    if not arrays:
        raise errors.DataError(
            f"The split {split!r} of {builder.info.full_name} in {builder.data_dir} is "
            "empty. Prepare the data set again."
        )
    place = f"{builder.info.full_name} {split}"
    return list(zip(*(_plain(values, place) for values in arrays), strict=True))


def _plain(values, place):
    """Returns bytes as strings without spaces around them, numbers as they are."""
    if values.dtype != object:
        return values.tolist()
    found = []
    for number, value in enumerate(values, start=1):
        try:
            found.append(value.decode("utf-8").strip())
        except UnicodeDecodeError as error:
            raise errors.DataError(f"{place}, row {number}: {error}.") from error
    return found


def _examples(place, rows, labels, bad) -> list[text.Example]:
    """Turns the rows of a split into examples; adds those that are none to `bad`."""
    index = {label: position for position, label in enumerate(labels)}
    hidden = sum(row[-1] == _HIDDEN for row in rows)
    if hidden and _HIDDEN not in index:
        raise errors.DataError(
            f"{place}: {hidden} of {len(rows)} labels are hidden ({_HIDDEN}), as in "
            "the test splits of GLUE. Expected a split with labels."
        )
    examples, known = [], tables.list_names(labels)
    for number, (first, *second, label) in enumerate(rows, start=1):
        if label not in index:
            reason = f"label {label!r} is not one of {known}"
            bad.append(tables.BadRow(place, number, reason))
        elif not all((first, *second)):
            bad.append(tables.BadRow(place, number, "a text is empty"))
        else:
            examples.append(text.Example(first, index[label], *second))
    return examples


def _notes(builder, columns, bad):
    """Returns what was left out."""
    notes = [f"{len(bad)} bad row(s) skipped"] if bad else []
    unused = sorted(set(builder.info.splits) - set(columns.splits))
    if unused:
        notes.append(f"unused: {', '.join(unused)} of {builder.info.full_name}")
    return notes
