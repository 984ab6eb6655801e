"""Labeled texts: what a corpus is, CSV and TSV files, and reproducible splits."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import config_dict

from tfamp import errors
from tfamp.training import tables

_MANY = 20  # Classes that may have one text each.


class Example(NamedTuple):
    """A text or a pair of texts, and the index of its class in `Corpus.classes`."""

    text: str
    label: int
    second: str | None = None


class Corpus(NamedTuple):
    """Examples of three splits, each in a fixed, shuffled order.

    Attributes:
      train: Examples to train on.
      validation: Examples split off the training data; they select the checkpoint.
      test: Examples scored once.
      classes: Class names, sorted, or in the order that the data set has; an example's
        label is an index into them.
      notes: What was left out and why, for the report; never silently.
    """

    train: list[Example]
    validation: list[Example]
    test: list[Example]
    classes: tuple[str, ...]
    notes: tuple[str, ...]


def load_csv(config: config_dict.ConfigDict, data_dir: str | None) -> Corpus:
    """Reads a corpus from local CSV or TSV files.

    Args:
      config: `config.data` has
        train_file: File in `data_dir`, or a pattern such as "*.txt" of several.
        test_file: The same; "": `test_fraction` of the training rows is held out.
        text_column, label_column: Names in the header; without a header
          (`header=False`) positions from "0".
        second_text_column: The same, of the second text of a pair; "": single texts.
        delimiter, quoted: "," or a tab; whether `"` quotes fields.
        on_bad_rows: "raise", or "skip" to leave them out and say how many.
        split_seed: Seed of the splits, apart from the seed of a run.
      data_dir: Folder of the files.

    Returns:
      A `Corpus`. Rows of the same text are always in the same split of one file.

    Raises:
      DataError: If a file is missing or has unusable rows, naming file, row, reason.
    """
    data = config.data
    wanted = (data.text_column, data.second_text_column, data.label_column)
    columns = [name for name in wanted if name]
    train_rows, bad = tables.read_table(config, data_dir, data.train_file, columns)
    classes = tuple(sorted({_label(row) for row in train_rows}))
    index = {label: number for number, label in enumerate(classes)}
    test_rows: list[tables.Record] = []
    if data.test_file:
        test_rows, bad_test = tables.read_table(
            config, data_dir, data.test_file, columns
        )
        bad = bad + bad_test + _unknown_labels(test_rows, index)
        test_rows = [row for row in test_rows if _label(row) in index]
    tables.handle_bad_rows(bad, data.on_bad_rows)
    train, test = ([_example(row, index) for row in r] for r in (train_rows, test_rows))
    notes = (f"{len(bad)} bad row(s) skipped",) if bad else ()
    return make_corpus(train, test if data.test_file else None, classes, config, notes)


def make_corpus(
    train: Sequence[Example],
    test: Sequence[Example] | None,
    classes: Sequence[str],
    config: config_dict.ConfigDict,
    notes: Sequence[str] = (),
) -> Corpus:
    """Shuffles examples and splits off what selects the checkpoint.

    Args:
      train: Training examples.
      test: Test examples; None: `config.data.test_fraction` of the others.
      classes: Class names.
      config: `config.validation_fraction` of the training examples select; 0: none.
        `config.data.split_seed` is the seed.
      notes: What was left out and why.

    Returns:
      A `Corpus`; a note tells how many texts are both in `train` and `test`.

    Raises:
      DataError: If nothing can be learned or scored: no example, one class, or hardly
        two examples of a class.
    """
    seed = config.data.split_seed
    _check(train, test, classes, config.data)
    if test is None:
        train, test = split(train, config.data.test_fraction, seed)
    else:
        test = shuffle(test, seed)
    notes = tuple(notes)
    # Before a part of `train` selects the checkpoint, which must not know the test.
    shared = {example_key(e) for e in train} & {example_key(e) for e in test}
    if shared:
        notes += (f"{len(shared)} text(s) are in both the train and the test file",)
    validation: list[Example] = []
    if config.validation_fraction:
        train, validation = split(train, config.validation_fraction, seed + 1)
    else:
        train = shuffle(train, seed + 1)
    return Corpus(list(train), validation, list(test), tuple(classes), notes)


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
    keys = sorted({example_key(example) for example in examples})
    if len(keys) < 2:
        raise errors.DataError(
            f"{len(keys)} distinct text(s) cannot be split. Expected 2 or more."
        )
    order = np.random.default_rng(seed).permutation(len(keys))
    rank = {keys[index]: place for place, index in enumerate(order)}
    ordered = sorted(examples, key=lambda e: (rank[example_key(e)], e))
    held_out = min(max(round(fraction * len(keys)), 1), len(keys) - 1)
    ranks = [rank[example_key(example)] for example in ordered]
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


def example_key(example: Example) -> str:
    """Returns what makes two examples the same: their texts, but not their labels."""
    if example.second is None:
        return text_key(example.text)
    return f"{text_key(example.text)}\n{text_key(example.second)}"


def _label(row):
    """Returns the label of a row: its last value."""
    return row.values[-1]


def _example(row, index):
    """Turns a row of (text, [second text,] label) into an example."""
    first, *second, label = row.values
    return Example(first, index[label], *second)


def _unknown_labels(rows, index):
    """Returns the test rows whose class the training file does not have."""
    known = tables.list_names(index)
    return [
        tables.BadRow(
            row.file, row.number, f"label {_label(row)!r} is not one of {known}"
        )
        for row in rows
        if _label(row) not in index
    ]


def _check(train, test, classes, data):
    """Raises if nothing can be learned or scored."""
    used = sorted({example.label for example in train})
    source = data.get("train_file") or data.get("name")
    wrong = f"{source} has {len(used)} class(es) in {len(train)} usable training row(s)"
    names = tables.list_names(classes[label] for label in used)
    if len(used) < 2:
        raise errors.DataError(
            f"{wrong}, column {data.label_column!r}: {names}. Expected at least 2."
        )
    if len(used) > max(len(train) // 2, _MANY):
        raise errors.DataError(
            f"{wrong}: {names}. Expected several rows of each: set "
            f"config.data.label_column (now {data.label_column!r})."
        )
    if test is not None and not test:
        raise errors.DataError(
            f"{data.get('test_file') or source} has no usable row to score: none has a "
            f"text and one of the labels {names} of the training rows."
        )
