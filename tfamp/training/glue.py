"""Text classification data of TFDS: the tasks of GLUE, and any set with texts."""

from typing import NamedTuple

import numpy as np
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
    if name == "glue/stsb":
        raise errors.DataError(
            "'glue/stsb' is a regression. Expected a data set with classes: "
            f"{', '.join(GLUE)}, or another name in TFDS."
        )
    builder = data.prepared_builder(name, data_dir, manual_dir)
    columns = _find_columns(builder, config)
    read = {split: _read(builder, split, columns) for split in columns.splits}
    names = getattr(builder.info.features[columns.label], "names", None)
    labels = list(range(len(names))) if names else _found_labels(name, read["train"])
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
    return columns


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
    for name, values in zip(columns.features[:-1], arrays, strict=False):
        if values.dtype != object or values.ndim != 1:
            raise errors.DataError(
                f"The feature {name!r} of {builder.info.full_name} is not text. "
                f"Received: {values.dtype} {values.shape[1:]}. Set "
                "config.data.text_column."
            )
    return list(zip(*map(_plain, arrays), strict=True))


def _plain(values):
    """Returns bytes as strings without spaces around them, numbers as they are."""
    if values.dtype == object:
        return [value.decode("utf-8").strip() for value in values]
    return values.tolist()


def _found_labels(name, rows) -> list:
    """Returns the labels of the training split, for a feature that names none."""
    labels = {row[-1] for row in rows}
    if any(isinstance(label, float) for label in labels):
        raise errors.DataError(
            f"The labels of {name!r} are real numbers. Expected classes."
        )
    return sorted(labels)


def _examples(place, rows, labels, bad) -> list[text.Example]:
    """Turns the rows of a split into examples; adds those that are none to `bad`."""
    index = {label: position for position, label in enumerate(labels)}
    hidden = sum(row[-1] == _HIDDEN for row in rows)
    if hidden and _HIDDEN not in index:
        raise errors.DataError(
            f"{place}: {hidden} of {len(rows)} labels are hidden ({_HIDDEN}), as in "
            "the test splits of GLUE. Expected a split with labels."
        )
    examples = []
    for number, (first, *second, label) in enumerate(rows, start=1):
        if label not in index:
            reason = f"label {label!r} is not one of {', '.join(map(str, labels))}"
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
