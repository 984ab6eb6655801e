"""Columns of local CSV and TSV files, with what is wrong in each row."""

import contextlib
import csv
import glob
import io
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ml_collections import config_dict

from tfamp import errors

_LINES = 5  # Bad rows that an error lists.
_NAMES = 20  # Classes that a line lists.


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
    allow_empty: bool = False,
) -> tuple[list[Record], list[BadRow]]:
    """Reads some columns of the files that a name or a pattern stands for.

    Args:
      config: `config.data` has
        delimiter, quoted: "," or a tab, which may be the escape "\\t"; whether `"`
        quotes fields.
        header: Whether the first row names the columns.
      data_dir: Folder of the files.
      pattern: File in `data_dir`, or a pattern such as "*.txt" of several.
      columns: Names in the header; without a header positions from "0".
      allow_empty: Whether a row may have empty fields among the wanted ones.

    Returns:
      The rows, their fields in the order of `columns` and without spaces around
      them, and the rows that have too many or too few fields or, unless allowed, an
      empty one. Blank lines are no rows, but count.

    Raises:
      DataError: If there is no such file, column or usable row, a name of a column is
        there twice, or a file is not readable as such text.
      ValueError: If `delimiter` is not one character.
    """
    delimiter = _check_delimiter(config.data)
    records: list[Record] = []
    bad: list[BadRow] = []
    paths = find_files(data_dir, pattern, config.data)
    with _fields_of_any_length():
        for path in paths:
            found = list(_read_file(path, config.data, delimiter, columns, allow_empty))
            if not found and len(paths) > 1:
                raise errors.DataError(
                    f"{path} has no row. Correct it, or leave it out of {pattern!r}."
                )
            bad += [item for item in found if isinstance(item, BadRow)]
            records += [item for item in found if isinstance(item, Record)]
    if not records:
        raise errors.DataError(
            f"{pattern} in {data_dir} has no usable row. {list_bad_rows(bad)}".strip()
        )
    return records, bad


@contextlib.contextmanager
def _fields_of_any_length():
    """Lifts the limit of Python's `csv`, 131,072 characters, which is the process's."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


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
    lines = [f"{b.file}, row {b.number}: {b.reason}" for b in bad]
    return f"{len(bad)} bad row(s). {list_lines(lines)}."


def list_lines(lines: Sequence[str]) -> str:
    """Returns up to five of some lines as one, and how many more there are."""
    more = len(lines) - _LINES
    return "; ".join(lines[:_LINES]) + (f"; and {more} more" if more > 0 else "")


def list_names(names: Iterable[object]) -> str:
    """Returns up to twenty names, such as those of classes, and how many there are."""
    shown = list(map(str, names))
    more = f", ... ({len(shown)})" if len(shown) > _NAMES else ""
    return ", ".join(shown[:_NAMES]) + more


def _check_delimiter(data):
    """Returns the delimiter, which a shell may have passed as an escape."""
    found = data.delimiter.replace(r"\t", "\t")
    if not found or set(found) & set('"\r\n') or (data.quoted and len(found) > 1):
        raise ValueError(
            "The delimiter must be one character (\\t: a tab; more where fields "
            "are not quoted), no quote and no line end. Received: "
            f"delimiter={data.delimiter!r}, quoted={data.quoted}."
        )
    return found


def _name_settings(data, ending):
    """Returns ", or set " and the settings of an ending; "" where there are none."""
    names = [n for n in sorted(data) if n.endswith((ending, f"{ending}s"))]
    found = ", ".join(f"config.data.{n}" for n in names)
    return f", or set {found}" if found else ""


def find_files(
    data_dir: str | None, pattern: str, data: config_dict.ConfigDict
) -> list[str]:
    """Returns the paths of a file name or pattern in a folder.

    Args:
      data_dir: The folder.
      pattern: File in it, or a pattern such as "*.txt" of several.
      data: `config.data`; its names of files are told where there is none.

    Raises:
      DataError: If there is no folder, or no such file in it.
    """
    if not data_dir:
        raise errors.DataError(
            f"This task reads local files ({pattern}). Pass their folder: "
            "--data_dir=FOLDER."
        )
    names = [pattern] if os.path.isfile(os.path.join(data_dir, pattern)) else []
    # Not of the joined path: a folder's name is no pattern.
    names = names or sorted(glob.glob(pattern, root_dir=data_dir))
    paths = [os.path.join(data_dir, name) for name in names]
    if not paths:
        raise errors.DataError(
            f"No file {pattern} in the folder --data_dir={data_dir}. Pass the folder "
            f"that holds it{_name_settings(data, '_file')}."
        )
    return paths


def _read_file(
    path: str, data, delimiter, columns, allow_empty
) -> Iterator[Record | BadRow]:
    """Yields the rows of one file, usable or not."""
    number, places, width = 0, None, 0
    content = read_text(path)
    try:
        records = _records(content, delimiter, data.quoted)
        for number, fields in enumerate(records, start=1):
            if places is None:
                places, width = _find_columns(path, fields, columns, data)
                if data.header:
                    continue
            if fields not in ([], [""]):  # A blank line.
                yield _parse(path, number, fields, places, width, allow_empty)
    except csv.Error as error:
        raise errors.DataError(
            f"{path}, row {number + 1}: {error}. Expected delimiter={delimiter!r}, "
            f"quoted={data.quoted}."
        ) from error


def read_text(path: str | os.PathLike) -> str:
    """Returns a UTF-8 file's text, without a byte order mark.

    Raises:
      DataError: If it cannot be read, or is not UTF-8.
    """
    try:
        return pathlib.Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise errors.DataError(f"Cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise errors.DataError(
            f"{path}, line {line}: the byte 0x{error.object[error.start]:02x} is not "
            "UTF-8. Save the file as UTF-8."
        ) from error


def _records(content, delimiter, quoted):
    """Returns an iterator of the lists of fields in a text."""
    if quoted:
        # `strict`: a quote that stays open is an error, not one huge field.
        file = io.StringIO(content, newline="")
        return csv.reader(file, delimiter=delimiter, strict=True)
    # A line ends at "\n" alone: texts hold other separators, and quotes.
    lines = content.rstrip("\r\n").split("\n")
    return (line.rstrip("\r").split(delimiter) for line in lines)


def _find_columns(path, first, columns, data):
    """Returns (name, position) of the wanted columns, and the row width."""
    names = first if data.header else [str(place) for place in range(len(first))]
    missing = [name for name in columns if name not in names]
    twice = [name for name in columns if names.count(name) > 1]
    if missing or twice:
        wrong = f"no column {', '.join(map(repr, missing))}"
        if twice:
            wrong = f"two columns {', '.join(map(repr, twice))}"
        raise errors.DataError(
            f"{path}, row 1: {wrong}. Found: {list_names(map(repr, names))}. Correct "
            f"the file{_name_settings(data, '_column')}."
        )
    return [(name, names.index(name)) for name in columns], len(names)


def _parse(path, number, fields, places, width, allow_empty):
    """Returns a row, or why it is not one."""
    if len(fields) != width:
        return BadRow(path, number, f"{len(fields)} field(s), expected {width}")
    values = tuple(fields[place].strip() for _, place in places)
    if not allow_empty and not all(values):
        name = places[values.index("")][0]
        return BadRow(path, number, f"column {name!r} is empty")
    return Record(path, number, values)
