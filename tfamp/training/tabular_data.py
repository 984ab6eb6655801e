"""Rows of a table for regression: checked, split by time, with what was left out."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from ml_collections import config_dict

from tfamp import errors
from tfamp.training import tables, tabular_columns, tabular_files


class Rows(NamedTuple):
    """Rows of a table.

    Attributes:
      categories: Categorical column -> values, str objects [rows]; "" where missing.
      numbers: Continuous column -> values, float64 [rows]; NaN where missing.
      target: Target, float64 [rows], at least 0.
      time: First time column as it is written, str objects [rows]; "" without one.
    """

    categories: dict[str, np.ndarray]
    numbers: dict[str, np.ndarray]
    target: np.ndarray
    time: np.ndarray

    def take(self, places: np.ndarray | slice) -> "Rows":
        """Returns the rows at some places."""
        return Rows(
            {name: values[places] for name, values in self.categories.items()},
            {name: values[places] for name, values in self.numbers.items()},
            self.target[places],
            self.time[places],
        )


class Splits(NamedTuple):
    """The rows of three splits.

    Attributes:
      train: The earliest rows, in a fixed, shuffled order.
      validation: The rows that follow them in time; none for a share of 0.
      test: The latest rows, in their order.
      ordered: Whether there is a time; else the splits are drawn.
      notes: What was left out and why, for the report.
    """

    train: Rows
    validation: Rows
    test: Rows
    ordered: bool
    notes: tuple[str, ...]


def load(config: config_dict.ConfigDict, data_dir: str | None) -> Splits:
    """Reads a table and splits it, the latest rows last.

    Args:
      config: `config.data` has what `tabular_files.read` reads, and
        target_column: numbers of at least 0;
        categorical_columns, continuous_columns: the features;
        date_column, date_format: a date, and how it is written;
        date_parts: some of `tabular_columns.DATE_PARTS`, categorical columns named
          COLUMN_PART;
        time_columns: the date and numbers that rows are ordered by, first to last;
          none: the order is drawn, by `split_seed`;
        test_fraction: share of the rows, the latest, that are scored;
        leave_out: pairs of a column and a value, rows with which are left out;
        missing_values: fields that mean that there is no value, beside the empty one:
          a category of its own, or for continuous columns as `fill_missing` says;
        on_bad_rows: "raise", or "skip" to leave them out and say how many.
        `config.validation_fraction` of the rows before those of the test, the latest,
        select the checkpoint. `config.limit_examples` of each split are kept.
      data_dir: Folder of the files.

    Returns:
      The `Splits`. Rows of one time are all in one split.

    Raises:
      DataError: If there is no such file or column, a row cannot be used (file, row
        and reason are told), or there are too few to split.
      ImportError: If an optional dependency is missing.
      ValueError: If the settings contradict each other.
    """
    data = config.data
    tabular_columns.check_settings(data)
    table, bad = tabular_files.read(config, data_dir, _wanted(data))
    if not len(table.numbers):
        raise errors.DataError(
            f"No row is left of {data.table_file} with its rows of {data.join_file}. "
            f"{tables.list_bad_rows(bad)}"
        )
    table, notes = _leave_out(table, data.leave_out)
    parser = _Parser(table, data)
    rows, ranks = parser.parse()
    bad = bad + parser.bad_rows()
    tables.handle_bad_rows(bad, data.on_bad_rows)
    if bad:
        notes.append(f"{len(bad)} bad row(s) skipped")
    ordered = bool(data.time_columns)
    if not ordered:
        order = np.random.default_rng(data.split_seed).permutation(len(rows.target))
        rows = rows.take(order)
    first = _cut(ranks, data.test_fraction, "test")
    middle = first
    if config.validation_fraction:
        middle = _cut(ranks[:first], config.validation_fraction, "validation")
    # Shuffled once, as the pipeline's buffer does not hold all of a large table.
    order = np.random.default_rng(data.split_seed + 1).permutation(middle)
    parts = order, slice(middle, first), slice(first, None)
    limit = slice(config.limit_examples or None)
    train, validation, test = (rows.take(part).take(limit) for part in parts)
    return Splits(train, validation, test, ordered, tuple(notes))


def _wanted(data):
    """Returns the columns to read."""
    dates = [data.date_column] if data.date_column else []
    names = [
        *(data.target_column, *data.categorical_columns, *data.continuous_columns),
        *(*dates, *data.time_columns, *(name for name, _ in data.leave_out)),
    ]
    return list(dict.fromkeys(names))


def _leave_out(table, pairs):
    """Returns the table without the rows that have one of the values, and notes."""
    notes = []
    for name, value in pairs:
        has = table.columns[name] == value
        notes.append(f"{int(has.sum())} rows with {name} {value} left out")
        table = table.take(~has)
    if not len(table.numbers):
        raise errors.DataError(
            f"No row is left of the table. {'; '.join(notes)}. Change "
            f"config.data.leave_out={pairs!r}."
        )
    return table, notes


class _Parser:
    """Turns a table of text into numbers and categories, and tells what it cannot."""

    def __init__(self, table, data):
        self.table, self.data = table, data
        self.pd = tabular_files.import_pandas()
        self.reasons: dict[int, str] = {}  # Place of a row -> what is wrong first.
        missing = {"", *data.missing_values}
        self.series = {
            name: self.pd.Series(values) for name, values in table.columns.items()
        }
        self.absent = {n: s.isin(missing).to_numpy() for n, s in self.series.items()}

    def parse(self):
        """Returns the good rows by time, and the rank of each one's time, int64."""
        data = self.data
        target = self._numbers(data.target_column, required=True)
        self._reject(target < 0, data.target_column, "is below 0")
        required = data.fill_missing == "raise"
        numbers = {n: self._numbers(n, required) for n in data.continuous_columns}
        dates: Any = self._dates()
        keys = [
            dates.to_numpy().astype("int64")
            if name == data.date_column
            else self._numbers(name, required=True)
            for name in data.time_columns
        ]
        good = np.array([p not in self.reasons for p in range(len(target))], bool)
        order = np.flatnonzero(good)
        if keys:
            order = order[np.lexsort([key[good] for key in reversed(keys)])]
        return (
            Rows(
                self._categories(dates, order),
                {name: values[order] for name, values in numbers.items()},
                target[order],
                self._time(order),
            ),
            _ranks([key[order] for key in keys], len(order)),
        )

    def bad_rows(self):
        """Returns the rows that `parse` left out, in their order."""
        return [self.table.bad_row(*item) for item in sorted(self.reasons.items())]

    def _reject(self, wrong, name, words):
        for place in np.flatnonzero(wrong):
            value = self.table.columns[name][place]
            shown = f"column {name!r} {words}" + (f": {value!r}" if value else "")
            self.reasons.setdefault(int(place), shown)

    def _numbers(self, name, required):
        """Returns float64 values, NaN where there is none."""
        absent = self.absent[name]
        text = self.series[name].where(~absent)
        values = self.pd.to_numeric(text, errors="coerce").to_numpy("float64")
        with np.errstate(over="ignore"):
            finite = np.isfinite(values.astype("float32"))  # As the model gets them.
        self._reject(~finite & ~absent, name, "is no finite float32 number")
        if required:
            self._reject(absent, name, "is empty")
        return values

    def _dates(self):
        name = self.data.date_column
        if not name:
            return None
        dates = self.pd.to_datetime(
            self.series[name], format=self.data.date_format, errors="coerce"
        )
        exact = self.pd.to_datetime(
            self.series[name], format=tabular_files.EXACT_DATE, errors="coerce"
        )
        dates = dates.dt.tz_localize(None).fillna(exact)  # All of one zone.
        words = f"is no date of the format {self.data.date_format!r}"
        self._reject(dates.isna().to_numpy(), name, words)
        return dates

    def _categories(self, dates, order):
        """Returns the categorical columns, "" for all that means that it is missing."""
        found = {
            name: np.where(self.absent[name], "", self.table.columns[name])[order]
            for name in self.data.categorical_columns
        }
        for part in self.data.date_parts:
            good = dates.iloc[order].dt
            values = good.isocalendar().week if part == "week" else getattr(good, part)
            texts = values.astype("int64").astype(str).to_numpy(object)
            found[f"{self.data.date_column}_{part}"] = texts
        return found

    def _time(self, order):
        if not self.data.time_columns:
            return np.full(len(order), "", object)
        return self.table.columns[self.data.time_columns[0]][order]


def _ranks(keys: Iterable[np.ndarray], rows: int) -> np.ndarray:
    """Returns 0 for the rows of the first time, 1 for those of the next, and so on."""
    new = np.ones(max(rows - 1, 0), bool)
    if keys := list(keys):
        new = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return np.concatenate([np.zeros(min(rows, 1), int), np.cumsum(new)])


def _cut(ranks, fraction, name):
    """Returns the first held-out row; where it can, more than the share of the rows.

    No time is on both sides.
    """
    rows = len(ranks)
    if rows and ranks[0] != ranks[-1]:
        rank = ranks[rows - max(1, min(round(fraction * rows), rows - 1))]
        return int(np.searchsorted(ranks, max(rank, ranks[0] + 1)))
    raise errors.DataError(
        f"The rows cannot be split for {name}. Received: {rows} usable rows of "
        f"{len(set(ranks))} different time(s), share {fraction}. Expected 2 or more."
    )
