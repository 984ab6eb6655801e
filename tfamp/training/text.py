"""Labeled texts: what a corpus is, CSV and TSV files, and reproducible splits."""

import csv
import glob
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import config_dict

from tfamp import errors

_SHOWN = 5  # Bad rows that an error lists.


class Example(NamedTuple):
    """A text and the index of its class in `Corpus.classes`."""

    text: str
    label: int


class Corpus(NamedTuple):
    """Examples of three splits, each in a fixed, shuffled order.

    Attributes:
      train: Examples to train on.
      validation: Examples split off the training data; they select the checkpoint.
      test: Examples scored once.
      classes: Class names, sorted; an example's label is an index into them.
      notes: What was left out and why, for the report; never silently.
    """

    train: list[Example]
    validation: list[Example]
    test: list[Example]
    classes: tuple[str, ...]
    notes: tuple[str, ...]


class Row(NamedTuple):
    """One row of a file; `number` counts from 1, the header included."""

    file: str
    number: int
    text: str
    label: str


class BadRow(NamedTuple):
    """A row that cannot be used, and why."""

    file: str
    number: int
    reason: str


def load_csv(config: config_dict.ConfigDict, data_dir: str | None) -> Corpus:
    """Reads a corpus from local CSV or TSV files.

    Args:
      config: `config.data` has
        train_file: File in `data_dir`, or a pattern such as "*.txt" of several.
        test_file: The same; "": `test_fraction` of the training rows is held out.
        text_column, label_column: Names in the header; without a header
          (`header=False`) positions from "0".
        delimiter, quoted: "," or a tab; whether `"` quotes fields.
        on_bad_rows: "raise", or "skip" to leave them out and say how many.
        split_seed: Seed of the splits, apart from the seed of a run.
      data_dir: Folder of the files.

    Returns:
      A `Corpus`. Rows of the same text are always in the same split of one file.

    Raises:
      DataError: If a file is missing or has unusable rows, naming file, row, reason.
    """
    train_rows, bad = _read_files(config, data_dir, config.data.train_file)
    classes = tuple(sorted({row.label for row in train_rows}))
    test_rows: list[Row] = []
    if config.data.test_file:
        test_rows, bad_test = _read_files(config, data_dir, config.data.test_file)
        unknown = _unknown_labels(test_rows, classes)
        test_rows = [row for row in test_rows if row.label in classes]
        bad = bad + bad_test + unknown
    _handle_bad_rows(bad, config.data.on_bad_rows)
    if len(classes) < 2:
        raise errors.DataError(
            f"{config.data.train_file} in {data_dir} has {len(classes)} class(es) in "
            f"column {config.data.label_column!r}: {', '.join(classes)}. Expected at "
            "least 2."
        )
    return _split_rows(train_rows, test_rows, classes, config, bad)


def split(
    examples: Sequence[Example], fraction: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """Shuffles, then splits; equal texts stay on one side.

    Args:
      examples: Examples in any order; the result does not depend on it.
      fraction: Share of the distinct texts that is held out, in (0, 1).
      seed: Seed of the shuffle.

    Returns:
      The larger part and the held-out part, each shuffled.

    Raises:
      ValueError: If `fraction` is not in (0, 1).
      DataError: If there are fewer than two distinct texts.
    """
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"A held-out share must be in (0, 1). Received: {fraction}.")
    keys = sorted({text_key(example.text) for example in examples})
    if len(keys) < 2:
        raise errors.DataError(
            f"{len(keys)} distinct text(s) cannot be split. Expected 2 or more."
        )
    order = np.random.default_rng(seed).permutation(len(keys))
    rank = {keys[index]: place for place, index in enumerate(order)}
    ordered = sorted(examples, key=lambda e: (rank[text_key(e.text)], e))
    held_out = min(max(round(fraction * len(keys)), 1), len(keys) - 1)
    ranks = [rank[text_key(example.text)] for example in ordered]
    first = int(np.searchsorted(ranks, held_out))
    return ordered[first:], ordered[:first]


def shuffle(examples: Sequence[Example], seed: int) -> list[Example]:
    """Returns the examples in an order that depends on them and the seed only."""
    ordered = sorted(examples)
    order = np.random.default_rng(seed).permutation(len(ordered))
    return [ordered[index] for index in order]


def limit(corpus: Corpus, count: int) -> Corpus:
    """Returns the first `count` examples of each split; 0 means all."""
    if not count:
        return corpus
    return corpus._replace(
        train=corpus.train[:count],
        validation=corpus.validation[:count],
        test=corpus.test[:count],
    )


def text_key(text: str) -> str:
    """Returns what makes two texts the same: words, without case and spacing."""
    return " ".join(text.lower().split())


def _split_rows(train_rows, test_rows, classes, config, bad):
    """Turns rows into the three splits of a `Corpus`."""
    index = {name: position for position, name in enumerate(classes)}
    seed = config.data.split_seed
    train = [Example(row.text, index[row.label]) for row in train_rows]
    if config.data.test_file:
        test = shuffle([Example(row.text, index[row.label]) for row in test_rows], seed)
    else:
        train, test = split(train, config.data.test_fraction, seed)
    train, validation = split(train, config.validation_fraction, seed + 1)
    notes = (f"{len(bad)} bad row(s) skipped",) if bad else ()
    shared = {text_key(e.text) for e in train} & {text_key(e.text) for e in test}
    if shared:
        notes += (f"{len(shared)} text(s) are in both the train and the test file",)
    return Corpus(train, validation, test, classes, notes)


def _read_files(config, data_dir, pattern):
    """Reads the files that a name or pattern stands for; numbers rows per file."""
    rows: list[Row] = []
    bad: list[BadRow] = []
    for path in _find_files(data_dir, pattern):
        for item in _read_file(path, config.data):
            if isinstance(item, BadRow):
                bad.append(item)
            else:
                rows.append(item)
    if not rows:
        raise errors.DataError(
            f"{pattern} in {data_dir} has no usable row. {_list_bad_rows(bad)}".strip()
        )
    return rows, bad


def _find_files(data_dir, pattern):
    """Returns the paths of a file name or pattern in a folder."""
    if not data_dir:
        raise errors.DataError(
            f"This task reads local files ({pattern}). Pass their folder: "
            "--data_dir=FOLDER."
        )
    path = os.path.join(data_dir, pattern)
    paths = [path] if os.path.isfile(path) else sorted(glob.glob(path))
    if not paths:
        raise errors.DataError(
            f"No file {pattern} in the folder --data_dir={data_dir}. Pass the folder "
            "that holds it, or set config.data.train_file and config.data.test_file."
        )
    return paths


def _read_file(path: str, data) -> Iterator[Row | BadRow]:
    """Yields the rows of one file, usable or not."""
    number, columns, width = 0, None, 0
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            for number, fields in enumerate(_records(file, data), start=1):
                if columns is None:
                    columns, width = _find_columns(path, fields, data)
                    if data.header:
                        continue
                yield _parse(path, number, fields, columns, width)
    except (csv.Error, UnicodeDecodeError) as error:
        raise errors.DataError(
            f"{path}, row {number + 1}: {error}. Expected UTF-8 text with "
            f"delimiter={data.delimiter!r}, quoted={data.quoted}."
        ) from error


def _records(file, data):
    """Returns an iterator of the lists of fields in an open file."""
    if data.quoted:
        # `strict`: a quote that stays open is an error, not one huge field.
        return csv.reader(file, delimiter=data.delimiter, strict=True)
    # A line ends at "\n" alone: texts hold other separators, and quotes.
    lines = file.read().rstrip("\r\n").split("\n")
    return (line.rstrip("\r").split(data.delimiter) for line in lines)


def _find_columns(path, first, data):
    """Returns (name, position) of the text and label columns, and the row width."""
    names = first if data.header else [str(place) for place in range(len(first))]
    wanted = (data.text_column, data.label_column)
    missing = [name for name in wanted if name not in names]
    if missing:
        raise errors.DataError(
            f"{path}, row 1: no column {', '.join(map(repr, missing))}. Found: "
            f"{', '.join(map(repr, names))}. Set config.data.text_column and "
            "config.data.label_column (and delimiter and header)."
        )
    return [(name, names.index(name)) for name in wanted], len(names)


def _parse(path, number, fields, columns, width):
    """Returns a row, or why it is not one."""
    if len(fields) != width:
        reason = f"{len(fields)} field(s), expected {width}"
        return BadRow(path, number, reason)
    (text_name, text_place), (label_name, label_place) = columns
    text, label = fields[text_place].strip(), fields[label_place].strip()
    if not text:
        return BadRow(path, number, f"empty text in column {text_name!r}")
    if not label:
        return BadRow(path, number, f"no label in column {label_name!r}")
    return Row(path, number, text, label)


def _unknown_labels(rows, classes):
    """Returns the test rows whose class the training file does not have."""
    return [
        BadRow(
            row.file,
            row.number,
            f"label {row.label!r} is not one of {', '.join(classes)}",
        )
        for row in rows
        if row.label not in classes
    ]


def _handle_bad_rows(bad, on_bad_rows):
    """Raises for bad rows unless they are to be skipped."""
    if on_bad_rows not in ("raise", "skip"):
        raise ValueError(
            "`config.data.on_bad_rows` must be 'raise' or 'skip'. Received: "
            f"{on_bad_rows!r}."
        )
    if bad and on_bad_rows == "raise":
        raise errors.DataError(
            f"{_list_bad_rows(bad)} Correct the file, or leave such rows out with "
            "config.data.on_bad_rows='skip'."
        )


def _list_bad_rows(bad):
    """Returns one line on up to five bad rows."""
    if not bad:
        return ""
    shown = "; ".join(f"{b.file}, row {b.number}: {b.reason}" for b in bad[:_SHOWN])
    more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    return f"{len(bad)} bad row(s). {shown}{more}."
