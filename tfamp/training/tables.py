"""Columns of local CSV and TSV files, with what is wrong in each row."""

import csv
import glob
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ml_collections import config_dict

from tfamp import errors

_SHOWN = 5  # Bad rows that an error lists.


class Record(NamedTuple):
    """The wanted fields of one row; `number` counts from 1, the header included."""

    file: str
    number: int
    values: tuple[str, ...]


class BadRow(NamedTuple):
    """A row that cannot be used, and why."""

    file: str
    number: int
    reason: str


def read_table(
    config: config_dict.ConfigDict,
    data_dir: str | None,
    pattern: str,
    columns: Sequence[str],
) -> tuple[list[Record], list[BadRow]]:
    """Reads some columns of the files that a name or a pattern stands for.

    Args:
      config: `config.data` has
        delimiter, quoted: "," or a tab; whether `"` quotes fields.
        header: Whether the first row names the columns.
      data_dir: Folder of the files.
      pattern: File in `data_dir`, or a pattern such as "*.txt" of several.
      columns: Names in the header; without a header positions from "0".

    Returns:
      The rows, their fields in the order of `columns` and without spaces around
      them, and the rows that have too many or too few fields or an empty one.

    Raises:
      DataError: If there is no such file, column or usable row, or a file is not
        readable as such text.
    """
    records: list[Record] = []
    bad: list[BadRow] = []
    for path in _find_files(data_dir, pattern):
        for item in _read_file(path, config.data, columns):
            if isinstance(item, BadRow):
                bad.append(item)
            else:
                records.append(item)
    if not records:
        raise errors.DataError(
            f"{pattern} in {data_dir} has no usable row. {list_bad_rows(bad)}".strip()
        )
    return records, bad


def handle_bad_rows(bad: Sequence[BadRow], on_bad_rows: str) -> None:
    """Raises for bad rows unless they are to be skipped.

    Args:
      bad: The rows.
      on_bad_rows: "raise" or "skip".

    Raises:
      DataError: If there are any, for "raise".
      ValueError: If `on_bad_rows` is neither.
    """
    if on_bad_rows not in ("raise", "skip"):
        raise ValueError(
            "`config.data.on_bad_rows` must be 'raise' or 'skip'. Received: "
            f"{on_bad_rows!r}."
        )
    if bad and on_bad_rows == "raise":
        raise errors.DataError(
            f"{list_bad_rows(bad)} Correct the file, or leave such rows out with "
            "config.data.on_bad_rows='skip'."
        )


def list_bad_rows(bad: Sequence[BadRow]) -> str:
    """Returns one line on up to five bad rows; "" for none."""
    if not bad:
        return ""
    shown = "; ".join(f"{b.file}, row {b.number}: {b.reason}" for b in bad[:_SHOWN])
    more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    return f"{len(bad)} bad row(s). {shown}{more}."


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


def _read_file(path: str, data, columns) -> Iterator[Record | BadRow]:
    """Yields the rows of one file, usable or not."""
    number, places, width = 0, None, 0
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            for number, fields in enumerate(_records(file, data), start=1):
                if places is None:
                    places, width = _find_columns(path, fields, columns, data.header)
                    if data.header:
                        continue
                yield _parse(path, number, fields, places, width)
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


def _find_columns(path, first, columns, header):
    """Returns (name, position) of the wanted columns, and the row width."""
    names = first if header else [str(place) for place in range(len(first))]
    missing = [name for name in columns if name not in names]
    if missing:
        raise errors.DataError(
            f"{path}, row 1: no column {', '.join(map(repr, missing))}. Found: "
            f"{', '.join(map(repr, names))}. Set config.data.text_column, "
            "config.data.label_column and the like (and delimiter and header)."
        )
    return [(name, names.index(name)) for name in columns], len(names)


def _parse(path, number, fields, places, width):
    """Returns a row, or why it is not one."""
    if len(fields) != width:
        return BadRow(path, number, f"{len(fields)} field(s), expected {width}")
    values = tuple(fields[place].strip() for _, place in places)
    if not all(values):
        name = places[values.index("")][0]
        return BadRow(path, number, f"column {name!r} is empty")
    return Record(path, number, values)
