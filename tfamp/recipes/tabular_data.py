"""Rows of a table for regression: read by pandas, and split by time."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import config_dict

from tfamp import errors, extras
from tfamp.recipes import data as data_sets

_ROW = data_sets.ROW


class Splits(NamedTuple):
    """Data frames of three splits.

    Their columns are the categorical ones, str, "" where missing; the continuous ones
    and the target, float64, NaN where missing.

    Attributes:
      train: The earliest rows, in a fixed, shuffled order.
      validation: The rows that follow them in time; none for a share of 0.
      test: The latest rows, in their order.
      starts: First time of validation and test, as written; empty: they are drawn.
      notes: What was left out and why, for the report.
    """

    train: Any
    validation: Any
    test: Any
    starts: tuple[str, ...]
    notes: tuple[str, ...]


def categorical_columns(data: config_dict.ConfigDict) -> list[str]:
    """Returns the categorical columns, those of the date included."""
    parts = [f"{data.date_column}_{part}" for part in data.date_parts]
    return [*data.categorical_columns, *parts]


def load(config: config_dict.ConfigDict) -> Splits:
    """Reads a table and splits it, the latest rows last.

    Args:
      config: `config.data` has the fields of `tabular.get_config`, which says what each
        is. Targets are numbers of at least 0. `config.validation_fraction` of the rows
        before those of the test, the latest, select the checkpoint.
        `config.limit_examples` of each split are kept. The files are in
        `config.data_dir`, else `config.manual_dir`.

    Returns:
      The `Splits`. Rows of one time are all in one split.

    Raises:
      DataError: If there is no such file or column, a row cannot be used (file, row
        and reason are reported), or there are too few to split.
      ValueError: If a setting is unknown.
    """
    data = config.data
    text = _read(data, config.data_dir or config.manual_dir)
    notes = []
    for name, value in data.leave_out:
        has = text[name].fillna("") == value
        notes.append(f"{has.sum()} rows with {name} {value} left out")
        text = text[~has]
    rows, times, problems = _parse(text, data)
    data_sets.report_bad_rows(problems, data.on_bad_rows, notes)
    if by := [*data.time_columns]:
        times = times.sort_values(by, kind="stable")
        rows = rows.loc[times.index]
        ranks = times.groupby(by, sort=False).ngroup().to_numpy()
    else:
        order = np.random.default_rng(data.split_seed).permutation(len(rows))
        rows, ranks = rows.iloc[order], np.arange(len(rows))
    first = middle = _cut(ranks, data.test_fraction, "test")
    if config.validation_fraction:
        middle = _cut(ranks[:first], config.validation_fraction, "validation")
    places = rows.index[sorted({middle, first})]
    starts = tuple(map(str, text[by[0]][places])) if by else ()
    # Shuffled once, as the pipeline's buffer does not hold all of a large table.
    order = np.random.default_rng(data.split_seed + 1).permutation(middle)
    parts = rows.iloc[order], rows.iloc[middle:first], rows.iloc[first:]
    limit = slice(config.limit_examples or None)
    train, validation, test = (part.iloc[limit] for part in parts)
    return Splits(train, validation, test, starts, tuple(notes))


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


# ---- Reading: all columns as text, NaN where there is nothing ----


def parse(config: config_dict.ConfigDict, rows: Any):
    """Returns new rows, whose target is not known, as `Splits` has them.

    Args:
      config: As for `load`, whose rows the model was trained on.
      rows: Data frame of text; has the features' columns as the files have them.

    Raises:
      DataError: If a column is missing, or a row cannot be used.
    """
    data = config.data.copy_and_resolve_references()
    # What chooses and orders the rows that train is not asked of new ones.
    data.time_columns = data.leave_out = ()
    data.date_column = data.date_column if data.date_parts else ""
    with_target = rows.assign(**{data.target_column: "0"})  # Any number will do.
    places = [f"row {number}" for number in range(1, len(rows) + 1)]
    text = _read(data, config.data_dir or config.manual_dir, with_target, places)
    parsed, _, problems = _parse(text, data)
    if problems:
        raise errors.DataError(
            f"{len(problems)} row(s) cannot be predicted: "
            f"{errors.examples(problems)}. Correct the file."
        )
    return parsed


def _read(data, data_dir, rows=None, places=()):
    """Returns the wanted columns and `_ROW`, of the files or of rows that are given."""
    wanted = [
        *(data.target_column, *data.categorical_columns, *data.continuous_columns),
        *([data.date_column] if data.date_column else []),
        *(*data.time_columns, *(name for name, _ in data.leave_out)),
    ]

    def read(columns):
        if rows is None:
            return _read_files(data, data_dir, data.table_file, columns)
        columns = [*dict.fromkeys(columns)]
        table = data_sets.pick(rows, columns).apply(_clean, data=data)
        return table.assign(**{_ROW: places}).astype({_ROW: "string"})

    if not data.join_file:
        return read(wanted)
    key, joined = data.join_key, [*data.join_columns]
    table = read([*(name for name in wanted if name not in joined), key])
    other = _read_files(data, data_dir, data.join_file, [key, *joined])
    other = other.drop(columns=_ROW).dropna(subset=key)
    if twice := [*other[key][other[key].duplicated()]]:
        raise errors.DataError(
            f"{data.join_file} has several rows of {key} {', '.join(twice[:5])}."
        )
    # Told of as bad rows: what they lack is no value that could be missing.
    alone = ~table[key].isin(other[key])
    table.loc[alone, data.target_column] = f"no row of {data.join_file} for it"
    return table.merge(other, "left", key)


def _read_files(data, data_dir, pattern, columns):
    """Returns columns of a file or a pattern of files, and `_ROW`."""
    columns = [*dict.fromkeys(columns)]
    if data.name == "diabetes":
        extras.require("pandas")  # scikit-learn makes the frame by it.
        datasets = extras.require("sklearn.datasets")
        # In the units they were measured in. Efron, Hastie, Johnstone and Tibshirani,
        # "Least Angle Regression", 2004,
        # https://www4.stat.ncsu.edu/~boos/var.select/diabetes.html.
        frame = datasets.load_diabetes(scaled=False, as_frame=True).frame
        places = [f"{data.name}, row {number + 1}" for number in range(len(frame))]
        table = frame[columns].apply(_clean, data=data).assign(**{_ROW: places})
    else:
        table = data_sets.read_files(data, data_dir, pattern, columns, _read_file)
    return table.astype({_ROW: "string"}).dropna(how="all", subset=columns)


def _read_file(data, path, columns):
    """Reads one file as `data.read_table` does."""
    if path.lower().endswith((".parquet", ".pq")):
        extras.require("pyarrow")
        table = extras.require("pandas").read_parquet(path, columns=columns)
        table.index = range(1, len(table) + 1)
    else:
        # With blank lines, so that rows can be counted.
        table = data_sets.read_table(data, path, columns, skip_blank_lines=False)
    return table[columns].apply(_clean, data=data)


def _clean(column, data):
    """Returns a column as text, NaN where there is nothing; dates stay dates."""
    pd = extras.require("pandas")
    if pd.api.types.infer_dtype(column) in ("date", "datetime", "datetime64"):
        return pd.to_datetime(column).dt.tz_localize(None)  # The clock's time.
    # Integers are floats where one is missing; a category "3" stays "3".
    text = column.convert_dtypes().astype("string").str.strip()
    return text.mask(text.isin(["", *data.missing_values]))


# ---- Parsing ----


def _parse(text, data):
    """Returns the good rows, what they are ordered by, and lines on the others."""
    pd = extras.require("pandas")
    problems = pd.Series(pd.NA, text.index, dtype="string")

    def reject(wrong, name, words):
        shown = text[name].astype("string").fillna("")
        lines = text[_ROW] + f": column {name!r} {words}: " + shown
        problems.mask(wrong & problems.isna(), lines, inplace=True)

    rows = {name: text[name].fillna("") for name in data.categorical_columns}
    target, times = data.target_column, {}
    if name := data.date_column:
        dates = pd.to_datetime(text[name], format=data.date_format, errors="coerce")
        times[name] = dates = dates.dt.tz_localize(None)  # All of one zone.
        reject(dates.isna(), name, f"is not a date of the format {data.date_format!r}")
        for part in data.date_parts:
            whole = dates.dt.isocalendar() if part == "week" else dates.dt
            column = getattr(whole, part).astype("Int64").astype("string")
            rows[f"{name}_{part}"] = column.fillna("")
    ordering = [name for name in data.time_columns if name != data.date_column]
    for name in dict.fromkeys([*data.continuous_columns, target, *ordering]):
        absent = text[name].isna()
        values = pd.to_numeric(text[name], errors="coerce").astype("float64")
        with np.errstate(over="ignore"):
            finite = np.isfinite(values.astype("float32"))  # As the model gets them.
        reject(~finite & ~absent, name, "is not a finite float32 number")
        if data.fill_missing == "raise" or name in (target, *ordering):
            reject(absent, name, "is empty")
        if name in ordering:
            times[name] = values
        if name == target or name in data.continuous_columns:
            rows[name] = values
    reject(rows[target] < 0, target, "is below 0")
    good = problems.isna()
    times = pd.DataFrame({name: times[name] for name in data.time_columns}, text.index)
    return pd.DataFrame(rows)[good], times[good], list(problems[~good])


def baseline(
    data: config_dict.ConfigDict, train, test, columns: Sequence[str]
) -> np.ndarray:
    """Predicts what any model should better: means of the training rows.

    Args:
      data: `config.data`.
      train: Training rows.
      test: Rows to predict.
      columns: Categorical ones, or none.

    Returns:
      The exponential of the mean log(1 + target), less 1, over the training rows that
      have the same values in these columns; over all where there is none. float64
      [rows].
    """
    logs = np.log1p(train[data.target_column])
    predictions = np.full(len(test), logs.mean())
    if columns:
        means = logs.groupby([train[name] for name in columns]).mean().rename("mean")
        found = test.join(means, on=[*columns])["mean"]
        predictions = found.fillna(logs.mean()).to_numpy()
    return np.expm1(predictions)
