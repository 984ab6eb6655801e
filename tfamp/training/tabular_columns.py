"""Names of a table's columns, and what is wrong with the settings that have them."""

import keyword
import re

from ml_collections import config_dict

DATE_PARTS = ("year", "month", "week", "day", "day_of_week", "day_of_year", "hour")
_FILL = ("raise", "median")
CONTINUOUS = "continuous"  # Name of the model's input of all continuous columns.
# Names of `tabular_model`'s layers, and what no argument of an exported signature can
# be named.
_TAKEN = re.compile(
    r"features|normalization|standardized|log_target|(dense|dropout)\d+|self|_.*"
)


def feature_name(column: str) -> str:
    """Returns the name of a column's input to the model, which layers can have."""
    return re.sub(r"[^0-9A-Za-z_]", "_", column)


def categorical_columns(data: config_dict.ConfigDict) -> list[str]:
    """Returns the categorical columns, those of the date included."""
    parts = [f"{data.date_column}_{part}" for part in data.date_parts]
    return [*data.categorical_columns, *parts]


def _find_taken(data):
    """Returns the categorical columns that the model can have no input of."""
    columns = categorical_columns(data)
    names = {name: feature_name(name) for name in columns}
    embeddings = {
        f"{kind}_{name}"
        for kind in ("embedding", "embedding_dropout")
        for name in names.values()
    }
    return [
        column
        for column, name in names.items()
        if _TAKEN.fullmatch(name) or keyword.iskeyword(name) or name in embeddings
    ]


def check_pairs(name: str, pairs: object) -> None:
    """Raises ValueError unless a setting is a tuple of pairs."""
    whole = isinstance(pairs, tuple | list)
    if not whole or any(not isinstance(p, tuple | list) or len(p) != 2 for p in pairs):
        raise ValueError(
            f"config.{name} must be a tuple of pairs, such as (('A', 1),). Received: "
            f"{pairs!r}."
        )


def check_settings(data: config_dict.ConfigDict) -> None:
    """Raises ValueError, naming all at once, if settings contradict each other.

    Args:
      data: `config.data`, as in `tabular_data.load`.
    """
    check_pairs("data.leave_out", data.leave_out)
    features = [*categorical_columns(data), *data.continuous_columns]
    names = [*map(feature_name, features), CONTINUOUS]
    joined = data.join_file, data.join_key, data.join_columns
    known = (*data.categorical_columns, *data.continuous_columns, data.target_column)
    taken = _find_taken(data)
    rules = {
        f"categorical columns need other names than {taken}, of the model's layers or "
        "reserved in its export: rename them in the table": not taken,
        "target_column must be named, and no feature": data.target_column
        and data.target_column not in features,
        "categorical_columns or continuous_columns must name a column": features,
        "the features' names must differ, also from 'continuous'": len(set(names))
        == len(names),
        f"date_parts must be of {DATE_PARTS}": set(data.date_parts) <= {*DATE_PARTS},
        "date_parts need date_column": data.date_column or not data.date_parts,
        "target_column is not known beforehand, and no time column": data.target_column
        not in data.time_columns,
        "join_file, join_key and join_columns belong together": all(joined)
        or not any(joined),
        "join_columns must be among the columns": set(data.join_columns)
        <= {*known, *data.time_columns, *(name for name, _ in data.leave_out)},
        f"fill_missing must be of {_FILL}": data.fill_missing in _FILL,
        "baseline_columns must be categorical": set(data.baseline_columns)
        <= set(categorical_columns(data)),
    }
    wrong = [words for words, holds in rules.items() if not holds]
    if wrong:
        shown = ("target_column", "categorical_columns", "continuous_columns")
        found = ", ".join(f"{name}={data[name]!r}" for name in shown)
        raise ValueError(
            f"Of config.data: {'; '.join(wrong)}. Received: {found}, "
            f"date_column={data.date_column!r}, date_parts={data.date_parts!r}, "
            f"time_columns={data.time_columns!r}, join={joined!r}, "
            f"fill_missing={data.fill_missing!r}, "
            f"baseline_columns={data.baseline_columns!r}."
        )
