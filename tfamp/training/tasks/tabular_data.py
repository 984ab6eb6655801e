"""Rows of a table for regression: read by pandas, split by time, encoded."""

import csv
import keyword
import pathlib
import re
from typing import Any, NamedTuple

import numpy as np
from ml_collections import config_dict

from tfamp import errors

CONTINUOUS = "continuous"  # Name of the model's input of all continuous columns.
UNSEEN = 0  # Index of every category that no training row has.
_ROW = "file and row"


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


def feature_name(column: str) -> str:
    """Returns the name of a column's input, which layers and signatures can have."""
    name = re.sub(r"[^0-9A-Za-z_]", "_", column)
    taken = not name[:1].isalpha() or keyword.iskeyword(name) or name == "self"
    return f"column_{name}" if taken else name


def check_settings(data: config_dict.ConfigDict) -> None:
    """Raises ValueError for settings that would train on the target, or lose a column.

    Args:
      data: `config.data`, as in `load`.
    """
    features = [*categorical_columns(data), *data.continuous_columns]
    names = [*map(feature_name, features), CONTINUOUS]
    rules = {
        "target_column must be named, and no feature": data.target_column
        and data.target_column not in features,
        "categorical_columns or continuous_columns must name a column": features,
        "the features' names must differ, also from 'continuous'": len(set(names))
        == len(names),
        "fill_missing must be 'raise' or 'median'": data.fill_missing
        in ("raise", "median"),
        "on_bad_rows must be 'raise' or 'skip'": data.on_bad_rows in ("raise", "skip"),
    }
    if wrong := [words for words, holds in rules.items() if not holds]:
        raise ValueError(
            f"Of config.data: {'; '.join(wrong)}. Received: target_column="
            f"{data.target_column!r}, features {features!r}, fill_missing="
            f"{data.fill_missing!r}, on_bad_rows={data.on_bad_rows!r}."
        )


def load(config: config_dict.ConfigDict, data_dir: str | None) -> Splits:
    """Reads a table and splits it, the latest rows last.

    Args:
      config: `config.data` has the fields of `tabular.get_config`, which says what each
        is. Targets are numbers of at least 0. `config.validation_fraction` of the rows
        before those of the test, the latest, select the checkpoint.
        `config.limit_examples` of each split are kept.
      data_dir: Folder of the files.

    Returns:
      The `Splits`. Rows of one time are all in one split.

    Raises:
      DataError: If there is no such file or column, a row cannot be used (file, row
        and reason are told), or there are too few to split.
      ValueError: If the settings contradict each other.
    """
    data = config.data
    check_settings(data)
    text = _read(data, data_dir)
    notes = []
    for name, value in data.leave_out:
        has = text[name].eq(value).fillna(False).astype(bool)
        notes.append(f"{has.sum()} rows with {name} {value} left out")
        text = text[~has]
    text = text.reset_index(drop=True)
    rows, times, problems = _parse(text, data)
    if len(problems):
        if data.on_bad_rows == "raise":
            raise errors.DataError(
                f"{len(problems)} bad row(s). {'; '.join(problems[:5])}. Correct them, "
                "or set config.data.on_bad_rows='skip'."
            )
        notes.append(f"{len(problems)} bad row(s) skipped")
    if data.time_columns:
        times = times.sort_values([*data.time_columns], kind="stable")
        ranks = times.groupby([*data.time_columns], sort=False).ngroup().to_numpy()
        rows = rows.loc[times.index]
    else:
        order = np.random.default_rng(data.split_seed).permutation(len(rows))
        rows, ranks = rows.iloc[order], np.arange(len(rows))
    first = _cut(ranks, data.test_fraction, "test")
    middle = first
    if config.validation_fraction:
        middle = _cut(ranks[:first], config.validation_fraction, "validation")
    starts = []
    if data.time_columns:
        places = rows.index[sorted({middle, first})]
        starts = [str(value) for value in text[data.time_columns[0]][places]]
    # Shuffled once, as the pipeline's buffer does not hold all of a large table.
    order = np.random.default_rng(data.split_seed + 1).permutation(middle)
    parts = rows.iloc[order], rows.iloc[middle:first], rows.iloc[first:]
    limit = slice(config.limit_examples or None)
    train, validation, test = (part.iloc[limit] for part in parts)
    return Splits(train, validation, test, tuple(starts), tuple(notes))


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


def _read(data, data_dir):
    """Returns the wanted columns and `_ROW`."""
    dates = [data.date_column] if data.date_column else []
    wanted = [
        *(data.target_column, *data.categorical_columns, *data.continuous_columns),
        *(*dates, *data.time_columns, *(name for name, _ in data.leave_out)),
    ]
    if data.name == "diabetes":
        return _read_files(data, None, "", wanted)
    if data.name != "table":
        raise ValueError(
            f"Unknown table. Received: config.data.name={data.name!r}. Expected "
            "'table', of the files that config.data.table_file names, or 'diabetes'."
        )
    if not data.join_file:
        return _read_files(data, data_dir, data.table_file, wanted)
    import pandas as pd

    key, joined = data.join_key, list(data.join_columns)
    own = [name for name in wanted if name not in joined]
    table = _read_files(data, data_dir, data.table_file, [*own, key])
    other = _read_files(data, data_dir, data.join_file, [key, *joined])
    other = other.drop(columns=_ROW).dropna(subset=key)
    try:
        found = table.merge(other, "left", key, validate="many_to_one", indicator=True)
    except pd.errors.MergeError as e:
        twice = list(other[key][other[key].duplicated()][:5])
        raise errors.DataError(
            f"{data.join_file} has several rows of {key} {', '.join(twice)}."
        ) from e
    alone = found["_merge"] == "left_only"
    if alone.all():
        raise errors.DataError(
            f"{data.join_file} has no row of any {key} of {data.table_file}, such as "
            f"{list(table[key][:5])}."
        )
    # Told of as bad rows: what they lack is no value that could be missing.
    found.loc[alone, data.target_column] = f"no row of {data.join_file} for it"
    return found.drop(columns="_merge")


def _read_files(data, data_dir, pattern, columns):
    """Returns columns of a file or a pattern of files, and `_ROW`."""
    import pandas as pd

    if data.name == "diabetes":
        paths = [pathlib.Path("diabetes")]
    else:
        paths = sorted(pathlib.Path(data_dir).glob(pattern)) if data_dir else []
    if not paths:
        raise errors.DataError(
            f"There is no file {pattern!r} in {data_dir!r}. Pass --data_dir=FOLDER "
            "with it, or set config.data.table_file and config.data.join_file."
        )
    columns, frames = list(dict.fromkeys(columns)), []
    for path in paths:
        try:
            frame, first = _read_file(path, data)
        except (OSError, ValueError) as e:  # pandas' and pyarrow's are of these.
            reason = str(e).strip().splitlines()[0]
            raise errors.DataError(f"{path} cannot be read: {reason}") from e
        if missing := [name for name in columns if name not in frame]:
            raise errors.DataError(
                f"{path}: no column {', '.join(map(repr, missing))}. Found: "
                f"{', '.join(map(repr, frame.columns[:20]))}. Set config.data."
                "target_column, config.data.categorical_columns and the others."
            )
        frame = frame[columns].apply(_clean, data=data)
        places = [f"{path}, row {n}" for n in range(first, first + len(frame))]
        frame[_ROW] = pd.Series(places, frame.index, dtype="string")
        frames.append(frame)
    return pd.concat(frames).dropna(how="all", subset=columns)


def _read_file(path, data):
    """Returns a data frame, and the number of its first row in the file."""
    import pandas as pd

    if data.name == "diabetes":
        from sklearn import datasets

        # In the units they were measured in. Efron, Hastie, Johnstone and Tibshirani,
        # "Least Angle Regression", 2004,
        # https://www4.stat.ncsu.edu/~boos/var.select/diabetes.html.
        return datasets.load_diabetes(scaled=False, as_frame=True).frame, 1
    if path.suffix.lower() in (".parquet", ".pq"):
        return pd.read_parquet(path), 1
    frame = pd.read_csv(
        path,
        sep=data.delimiter.encode().decode("unicode_escape"),  # "\\t" of a shell.
        header=0 if data.header else None,
        quoting=csv.QUOTE_MINIMAL if data.quoted else csv.QUOTE_NONE,
        dtype=str,
        keep_default_na=False,
        index_col=False,  # Else a first row with a field too many shifts the columns.
        skip_blank_lines=False,  # So that rows can be counted.
        encoding="utf-8-sig",
    )
    return frame.rename(columns=str), 1 + bool(data.header)


def _clean(column, data):
    """Returns a column as text, NaN where there is nothing; dates stay dates."""
    import pandas as pd

    if pd.api.types.infer_dtype(column) in ("date", "datetime", "datetime64"):
        return pd.to_datetime(column).dt.tz_localize(None)  # The clock's time.
    # Integers are floats where one is missing; a category "3" stays "3".
    text = column.convert_dtypes().astype("string").str.strip()
    return text.mask(text.isin(["", *data.missing_values]))


# ---- Parsing ----


def _parse(text, data):
    """Returns the good rows, what they are ordered by, and lines on the others."""
    import pandas as pd

    problems = pd.Series(pd.NA, text.index, dtype="string")

    def reject(wrong, name, words):
        shown = text[name].astype("string").fillna("")
        lines = text[_ROW] + f": column {name!r} {words}: " + shown
        problems.mask(wrong & problems.isna(), lines, inplace=True)

    def numbers(name, required=True):
        absent = text[name].isna()
        values = pd.to_numeric(text[name], errors="coerce").astype("float64")
        with np.errstate(over="ignore"):
            finite = np.isfinite(values.astype("float32"))  # As the model gets them.
        reject(~finite & ~absent, name, "is no finite float32 number")
        if required:
            reject(absent, name, "is empty")
        return values

    target = numbers(data.target_column)
    reject(target < 0, data.target_column, "is below 0")
    rows = {name: text[name].fillna("") for name in data.categorical_columns}
    rows = {name: values.astype("object") for name, values in rows.items()}
    dates = None
    if data.date_column:
        name = data.date_column
        dates = pd.to_datetime(text[name], format=data.date_format, errors="coerce")
        dates = dates.dt.tz_localize(None)  # All of one zone.
        reject(dates.isna(), name, f"is no date of the format {data.date_format!r}")
        for part in data.date_parts:
            whole = dates.dt.isocalendar() if part == "week" else dates.dt
            found = getattr(whole, part).astype("Int64").astype("string")
            rows[f"{name}_{part}"] = found.fillna("").astype("object")
    required = data.fill_missing == "raise"
    rows |= {name: numbers(name, required) for name in data.continuous_columns}
    rows[data.target_column] = target
    times = {
        name: dates if name == data.date_column else numbers(name)
        for name in data.time_columns
    }
    good = problems.isna()
    times = pd.DataFrame(times, text.index)
    return pd.DataFrame(rows)[good], times[good], list(problems[~good])


# ---- Encoding ----


class Encoder(NamedTuple):
    """From rows to a model's inputs.

    Attributes:
      transformer: scikit-learn's, fitted on the training rows alone; None: of random
        rows, which are encoded.
      categories: Categorical column -> its categories, sorted; the index of one is its
        position from 1.
      medians: Continuous column -> what stands for a missing value.
      mean: Of each continuous input, indicators of missing values last.
      variance: The same; 1 for a constant.
      target_mean: Of log(1 + target).
      target_scale: Standard deviation of log(1 + target); 1 for a constant.
    """

    transformer: Any
    categories: dict[str, list[str]]
    medians: dict[str, float]
    mean: dict[str, float]
    variance: dict[str, float]
    target_mean: float = 0.0
    target_scale: float = 1.0

    @property
    def sizes(self) -> dict[str, int]:
        """Categorical column -> number of indices, the unseen one included."""
        return {name: len(found) + 1 for name, found in self.categories.items()}

    def to_dict(self) -> dict[str, Any]:
        """Returns what one needs to prepare other rows for the model, for JSON."""
        return {
            "categories": self.categories,
            "unseen": UNSEEN,
            "inputs": {name: feature_name(name) for name in self.categories},
            CONTINUOUS: list(self.mean),
            "medians": self.medians,
            "output": "log(1 + target)",
        }


def fit(data: config_dict.ConfigDict, rows) -> Encoder:
    """Returns the encoder of training rows; the others have no say in it.

    Args:
      data: `config.data`.
      rows: `Splits.train`.

    Raises:
      DataError: If a continuous column has no value at all.
    """
    from sklearn import compose, impute, preprocessing

    names, numbers = categorical_columns(data), [*data.continuous_columns]
    if empty := [name for name in numbers if rows[name].isna().all()]:
        raise errors.DataError(
            f"No training row has a value of {', '.join(map(repr, empty))}. Leave it "
            "out of config.data.continuous_columns."
        )
    ordinal = preprocessing.OrdinalEncoder(
        handle_unknown="use_encoded_value", unknown_value=UNSEEN - 1
    )
    imputer = impute.SimpleImputer(strategy="median", add_indicator=True)
    transformer = compose.ColumnTransformer(
        [("categories", ordinal, names), ("numbers", imputer, numbers)],
        verbose_feature_names_out=False,
    ).set_output(transform="pandas")
    found = transformer.fit_transform(rows).drop(columns=names)
    fitted = transformer.named_transformers_
    logs = np.log1p(rows[[data.target_column]].to_numpy())
    target = preprocessing.StandardScaler().fit(logs)
    scales = [
        preprocessing.StandardScaler().fit(found[[name]].to_numpy()) for name in found
    ]
    return Encoder(
        transformer,
        {
            name: list(known)
            for name, known in zip(names, fitted["categories"].categories_, strict=True)
        }
        if names
        else {},
        dict(zip(numbers, fitted["numbers"].statistics_.tolist(), strict=True))
        if numbers
        else {},
        {n: float(s.mean_[0]) for n, s in zip(found, scales, strict=True)},
        {n: float(s.scale_[0]) ** 2 for n, s in zip(found, scales, strict=True)},
        float(target.mean_[0]),
        float(target.scale_[0]),
    )


def encode(encoder: Encoder, rows) -> dict[str, np.ndarray]:
    """Returns the model's inputs.

    Args:
      encoder: From `fit`.
      rows: Data frame of the same columns.

    Returns:
      Input -> int32 [rows] for each categorical column, and "continuous" -> float32
      [rows, columns], not normalized, which the model does; none where there is no
      such column.
    """
    found = encoder.transformer.transform(rows)
    inputs = {
        feature_name(name): found[name].to_numpy("int32") + 1
        for name in encoder.categories
    }
    if encoder.mean:
        inputs[CONTINUOUS] = found[list(encoder.mean)].to_numpy("float32")
    return inputs


def baseline(data: config_dict.ConfigDict, train, test) -> np.ndarray:
    """Predicts what any model should better: means of the training rows.

    Args:
      data: `config.data`; its `baseline_columns` are categorical, or none.
      train: Training rows.
      test: Rows to predict.

    Returns:
      The exponential of the mean log(1 + target), less 1, over the training rows that
      have the same values in these columns; over all where there is none. float64
      [rows].
    """
    logs = np.log1p(train[data.target_column])
    found = np.full(len(test), logs.mean())
    if columns := [*data.baseline_columns]:
        means = logs.groupby([train[name] for name in columns]).mean().rename("mean")
        found = test.join(means, on=columns)["mean"].fillna(logs.mean()).to_numpy()
    return np.expm1(found)
