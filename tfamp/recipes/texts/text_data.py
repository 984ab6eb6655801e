"""Labeled texts in three splits: CSV and TSV files, GLUE, sets of TFDS, docstrings."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ml_collections import config_dict

from tfamp import errors, extras
from tfamp.recipes import data as data_sets
from tfamp.recipes.texts import docstrings, text_sources

if TYPE_CHECKING:
    import pandas

_MANY = 20  # Classes that may have one text each.


class Corpus(NamedTuple):
    """Texts, or questions, of three splits, each in a fixed, shuffled order.

    Attributes:
      train: What is trained on: of texts a table with columns text and, of pairs,
        second, and label, the index of the class in `classes`.
      validation: Split off the training data; selects the checkpoint.
      test: Scored once.
      notes: What was left out and why, for the report; never silently.
      classes: Class names, sorted, or in the order that the data set has. Questions
        have none.
    """

    train: "pandas.DataFrame"
    validation: "pandas.DataFrame"
    test: "pandas.DataFrame"
    notes: tuple[str, ...]
    classes: tuple[str, ...] = ()


def load(config: config_dict.ConfigDict) -> Corpus:
    """Reads a corpus, shuffles it, and splits off what is not split yet.

    Args:
      config: `config.data` has
        name: "csv", "docstrings", or a name in TFDS such as "glue/sst2", whose
          validation split is then the test data; of other sets it is the split "test",
          else "validation".
        text_column, second_text_column, label_column: Columns, or features of TFDS;
          without a header positions from "0"; no second one: single texts.
        on_bad_rows: "raise", or "skip" to leave out rows without a text or a known
          label, and say how many.
        test_fraction: Share of the training texts that is held out where there is no
          test data.
        split_seed: Seed of the splits, apart from the seed of a run.
        Of "csv" also train_file, test_file ("" for none), delimiter, header, quoted; of
        "docstrings" libraries, texts_per_library, min_words.
        `config.validation_fraction` is the share that selects; 0: none.
        `config.limit_examples` are the most of each split; 0: all.
        `config.data_dir` is the folder of local files, or of data prepared by TFDS;
        `config.manual_dir` that of GLUE's TSV files (train.tsv and dev.tsv, or MRPC's
        msr_paraphrase_*.txt), or of another data set's original files.

    Returns:
      A `Corpus`. Rows of the same text, but for case and spaces, are in the same split
      of one file, as are docstrings of the same source file.

    Raises:
      DataError: If data are missing, malformed, or teach nothing; bad rows are named.
      ImportError: If an optional dependency is missing.
    """
    data = config.data
    for module in ("pandas", "sklearn"):
        extras.require(module)
    classes, notes = None, []
    if data.name == "csv":
        train, test = text_sources.read_csv_files(data, config.data_dir or ".")
    elif data.name == "docstrings":
        train, test = docstrings.read(data), None
        notes.append(f"docstrings of {docstrings.versions(data.libraries)}")
    elif data.name in text_sources.GLUE and config.manual_dir:
        train, test, classes = text_sources.read_glue_files(
            data.name, config.manual_dir
        )
    elif data.name:
        train, test, classes = text_sources.read_tfds(config)
    else:
        raise ValueError(
            "Unknown text data. Received: config.data.name=''. Expected "
            "'docstrings', 'csv' or a name in TFDS such as 'glue/sst2'."
        )
    classes = classes or tuple(sorted(set(train.label) - {""}))
    parts = [train] if test is None else [train, test]
    parts = _drop_bad_rows(parts, classes, data, notes)
    _check(parts, classes, data)
    return _split(parts, classes, config, notes)


# ---- Rows, classes, splits ----


def _drop_bad_rows(parts, classes, data, notes):
    """Returns the tables without rows of no text or no known label."""
    names = [name for name in ("text", "second", "label") if name in parts[0]]
    good, bad, class_names = [], [], data_sets.list_names(classes)
    for part in parts:
        unknown = ~part.label.isin(classes)
        empty = (part[names] == "").any(axis=1)
        bad += [f"{place}: a field is empty" for place in part.place[empty]]
        bad += [
            f"{row.place}: label {row.label!r} is not one of {class_names}"
            for row in part[unknown & ~empty].itertuples()
        ]
        good.append(part[~unknown & ~empty])
    data_sets.report_bad_rows(bad, data.on_bad_rows, notes)
    return good


def _check(parts, classes, data):
    """Raises if nothing can be learned or scored."""
    used = [name for name in classes if name in set(parts[0].label)]
    name = data.get("train_file") or data.name
    if not used:
        raise errors.DataError(
            f"{name} has no usable row to train on: none has a text and a label in the "
            f"column {data.label_column!r}. Expected rows of at least 2 classes."
        )
    if len(used) < 2 or len(used) > max(len(parts[0]) // 2, _MANY):
        raise errors.DataError(
            f"{name} has {len(used)} class(es) in {len(parts[0])} usable training "
            f"row(s), column {data.label_column!r}: {data_sets.list_names(used)}. "
            "Expected at least 2, and several rows of each."
        )
    if not len(parts[-1]):
        raise errors.DataError(
            f"{data.get('test_file') or data.name} has no usable row to score: none "
            f"has a text and one of the labels {data_sets.list_names(classes)}."
        )


def _split(parts, classes, config, notes):
    """Returns the corpus: shuffled, split where it is not, and limited."""
    numbers = {name: i for i, name in enumerate(classes)}
    parts = [
        part.assign(label=part.label.map(numbers), key=_keys(part)) for part in parts
    ]
    names = [name for name in ("text", "second", "label") if name in parts[0]]
    splits = (part[names] for part in split(parts, config, notes))
    return Corpus(*splits, tuple(notes), tuple(str(name) for name in classes))


def split(
    parts: Sequence["pandas.DataFrame"],
    config: config_dict.ConfigDict,
    notes: list[str],
) -> list["pandas.DataFrame"]:
    """Shuffles rows, and splits off what is not split yet.

    Args:
      parts: The training table, and the test table if there is one. Rows that have the
        same in the column `key` stay on one side of each split that is made here.
      config: As in `load`.
      notes: Gets a line where keys are in both tables.

    Returns:
      Train, validation and test table.

    Raises:
      DataError: If there are too few keys.
    """
    seed = config.data.split_seed
    train, *rest = (part.sample(frac=1, random_state=seed) for part in parts)
    fraction = config.data.test_fraction
    train, test = (train, *rest) if rest else hold_out(train, fraction, seed)
    # Before a part of `train` selects the checkpoint, which must not know the test.
    if shared := len(set(train.key) & set(test.key)):
        notes.append(f"{shared} text(s) are in both the train and the test file")
    validation = train[:0]
    if config.validation_fraction:
        train, validation = hold_out(train, config.validation_fraction, seed + 1)
    return [
        part.head(config.limit_examples or len(part)).reset_index(drop=True)
        for part in (train, validation, test)
    ]


def _keys(table):
    """Returns what makes two rows the same: words without case, or a source file."""
    if "file" in table:
        return table.file
    texts = table.text + ("\n" + table.second if "second" in table else "")
    return texts.str.lower().str.split().str.join(" ")


def hold_out(
    table: "pandas.DataFrame", fraction: float, seed: int
) -> tuple["pandas.DataFrame", "pandas.DataFrame"]:
    """Returns the larger part and the held-out part, each in the table's order.

    Args:
      table: Rows that have the same in the column `key` stay on one side.
      fraction: Share of the keys that is held out.
      seed: Seed of the choice.

    Raises:
      DataError: If there are too few keys.
    """
    model_selection = extras.require("sklearn.model_selection")
    splitter = model_selection.GroupShuffleSplit(
        1, test_size=fraction, random_state=seed
    )
    try:
        ((larger, held_out),) = splitter.split(table, groups=table.key)
    except ValueError as error:
        raise errors.DataError(
            f"{table.key.nunique()} distinct text(s) cannot be split: {error}"
        ) from error
    return table.iloc[larger], table.iloc[held_out]
