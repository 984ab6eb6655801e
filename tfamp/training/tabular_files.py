"""The columns of a table, as text: CSV or Parquet files, a join, a bundled set."""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import config_dict

from tfamp import errors
from tfamp.training import tables

PARQUET = (".parquet", ".pq")
# How dates of Parquet files are written that `config.data.date_format` would cut short.
EXACT_DATE = "%Y-%m-%d %H:%M:%S.%f"
_EXACT_INTEGERS = 2**53  # Floats from here on may stand for several integers.


class RawTable(NamedTuple):
    """Columns as text.

    Attributes:
      columns: Column name -> fields, str objects [rows]; "" where there is nothing.
      files: File of each row, str objects [rows].
      numbers: Its number in the file, int64 [rows]; from 1, the header of a CSV file
        included.
    """

    columns: dict[str, np.ndarray]
    files: np.ndarray
    numbers: np.ndarray

    def take(self, places: np.ndarray) -> "RawTable":
        """Returns the rows at some places, or where a mask is true."""
        columns = {name: values[places] for name, values in self.columns.items()}
        return RawTable(columns, self.files[places], self.numbers[places])

    def bad_row(self, place: int, reason: str) -> tables.BadRow:
        """Returns the row at a place, with what is wrong with it."""
        return tables.BadRow(self.files[place], int(self.numbers[place]), reason)


def import_pandas():
    """Returns pandas.

    Raises:
      ImportError: If it is missing, with the extra that has it.
    """
    try:
        import pandas as pd
    except ImportError as e:
        raise ImportError('Install pandas: pip install "tfamp[data]".') from e
    return pd


def read(
    config: config_dict.ConfigDict, data_dir: str | None, columns: Sequence[str]
) -> tuple[RawTable, list[tables.BadRow]]:
    """Reads columns of a table, some of them from a second one.

    Args:
      config: `config.data` has
        name: "table" for files, or "diabetes";
        table_file: file in `data_dir`, or a pattern of several; Parquet if it ends so,
          else CSV with what `tables.read_table` reads;
        join_file, join_key, join_columns: another such file with one row for each
          value of the column `join_key`, and what is taken from it; "": none.
      data_dir: Folder of the files.
      columns: Names of the columns.

    Returns:
      The table, and rows that have too many or too few fields, no key, a key that the
      second file has twice, or one that it has not.

    Raises:
      DataError: If a file, a column or every usable row is missing.
      ImportError: If pandas, pyarrow or scikit-learn is needed and missing.
      ValueError: If there is no such name.
    """
    data = config.data
    if data.name == "diabetes":
        return _load_diabetes(columns), []
    if data.name != "table":
        raise ValueError(
            f"Unknown table. Received: config.data.name={data.name!r}. Expected "
            "'table', of the files that config.data.table_file names, or 'diabetes'."
        )
    joined = set(data.join_columns)
    key = [data.join_key] if data.join_file else []
    wanted = [name for name in columns if name not in joined]
    table, bad = _read_files(
        config, data_dir, data.table_file, list(dict.fromkeys([*wanted, *key]))
    )
    if not data.join_file:
        return table, bad
    names = list(dict.fromkeys([*key, *data.join_columns]))
    other, bad_other = _read_files(config, data_dir, data.join_file, names)
    table, bad_keys = _join(table, other, data)
    return table, bad + bad_other + bad_keys


def _read_files(config, data_dir, pattern, columns):
    """Returns the table of a file or a pattern of files, and its bad rows."""
    if pattern.lower().endswith(PARQUET):
        return _read_parquet(config, data_dir, pattern, columns), []
    records, bad = tables.read_table(
        config, data_dir, pattern, columns, allow_empty=True
    )
    fields = zip(*(record.values for record in records), strict=True)
    table = RawTable(
        {n: np.array(f, object) for n, f in zip(columns, fields, strict=True)},
        np.array([record.file for record in records], object),
        np.array([record.number for record in records]),
    )
    return table, bad


def _read_parquet(config, data_dir, pattern, columns):
    """Returns the table of Parquet files."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as e:
        raise ImportError('Install pyarrow: pip install "tfamp[data]".') from e
    parts = []
    for path in tables.find_files(data_dir, pattern, config.data):
        try:
            names = pq.read_schema(path).names
            missing = [name for name in columns if name not in names]
            if missing:
                raise errors.DataError(
                    f"{path}: no column {', '.join(map(repr, missing))}. Found: "
                    f"{tables.list_names(map(repr, names))}."
                )
            frame = pq.read_table(path, columns=list(columns)).to_pandas(
                date_as_object=False
            )
        except (pa.ArrowException, OSError) as e:
            reason = str(e).splitlines()[0]
            raise errors.DataError(f"{path} cannot be read as Parquet: {reason}") from e
        numbers = np.arange(1, len(frame) + 1)
        fields = {name: _texts(frame[name], name, config.data) for name in columns}
        parts.append(RawTable(fields, np.full(len(frame), path, object), numbers))
    table = _concatenate(parts)
    if not len(table.numbers):
        raise errors.DataError(f"{pattern} in {data_dir} has no row.")
    return table


def _texts(series, name, data):
    """Returns a pandas column as a CSV file would have it."""
    pd = import_pandas()
    dtype = series.dtype
    if name == data.date_column and pd.api.types.is_datetime64_any_dtype(dtype):
        series = _date_texts(series, data.date_format)
    elif pd.api.types.is_float_dtype(dtype):
        known = series.dropna()
        # Integers become floats where one is missing; a category "3" stays "3".
        whole = (known == np.floor(known)) & (known.abs() < _EXACT_INTEGERS)
        if whole.all():
            series = series.astype("Int64")
    return series.astype("string").fillna("").to_numpy(object)


def _date_texts(series, date_format):
    """Returns dates in their format, or exactly if that leaves something out."""
    pd = import_pandas()
    local = series.dt.tz_localize(None)  # The clock's time, as a file would have it.
    texts = local.dt.strftime(date_format)
    read = pd.to_datetime(texts, format=date_format, errors="coerce")
    kept = (read == local) | local.isna()
    return texts if kept.all() else local.dt.strftime(EXACT_DATE)


def _concatenate(parts):
    names = parts[0].columns
    return RawTable(
        {name: np.concatenate([p.columns[name] for p in parts]) for name in names},
        np.concatenate([part.files for part in parts]),
        np.concatenate([part.numbers for part in parts]),
    )


def _join(table, other, data):
    """Returns the rows with the other table's columns, and the rows without a match."""
    key, missing = data.join_key, {"", *data.missing_values}
    no_key = f"column {key!r}, the key of the join, is empty"
    places: dict[str, int] = {}
    bad = []
    for place, value in enumerate(other.columns[key]):
        if value in missing:
            bad.append(other.bad_row(place, no_key))
            continue
        if value in places:
            bad.append(other.bad_row(place, f"{key} {value!r} is there twice"))
        places.setdefault(value, place)
    found = np.array([places.get(value, -1) for value in table.columns[key]])
    file = pathlib.Path(other.files[0]).name
    for place in np.flatnonzero(found < 0):
        value = table.columns[key][place]
        unmatched = f"no row of {file} has {key} {value!r}"
        reason = no_key if value in missing else unmatched
        bad.append(table.bad_row(place, reason))
    kept, found = table.take(found >= 0), found[found >= 0]
    columns = {
        name: values[found] for name, values in other.columns.items() if name != key
    }
    return kept._replace(columns={**kept.columns, **columns}), bad


def _load_diabetes(columns):
    """Returns scikit-learn's 442 patients, in the units they were measured in.

    References:
      Efron, Hastie, Johnstone and Tibshirani, "Least Angle Regression", Annals of
      Statistics, 2004, https://www4.stat.ncsu.edu/~boos/var.select/diabetes.html.
    """
    try:
        from sklearn import datasets
    except ImportError as e:
        raise ImportError('Install scikit-learn: pip install "tfamp[data]".') from e
    bunch = datasets.load_diabetes(scaled=False)
    values = dict(zip(bunch.feature_names, bunch.data.T, strict=True))
    values["target"] = bunch.target
    missing = [name for name in columns if name not in values]
    if missing:
        raise errors.DataError(
            f"The diabetes data have no column {', '.join(map(repr, missing))}. "
            f"Found: {', '.join(values)}."
        )
    rows = len(bunch.target)
    return RawTable(
        {n: np.array([f"{v:g}" for v in values[n]], object) for n in columns},
        np.full(rows, "diabetes", object),
        np.arange(1, rows + 1),
    )
