"""From the rows of a table to a model's inputs, as the training rows say."""

import keyword
import re
from typing import Any, NamedTuple

import numpy as np
from ml_collections import config_dict

from tfamp import errors, extras
from tfamp.recipes import tabular_data

CONTINUOUS = "continuous"  # Name of the model's input of all continuous columns.
UNSEEN = 0  # Index of every category that no training row has.
_MISSING = "missingindicator_"


class Encoder(NamedTuple):
    """From rows to a model's inputs.

    Attributes:
      categories: Categorical column -> its categories, sorted; the index of one is its
        position from 1.
      medians: Continuous column -> what stands for a missing value.
      mean: Of each continuous input, indicators of missing values last.
      variance: The same; 1 for a constant.
      target_mean: Of log(1 + target).
      target_scale: Standard deviation of log(1 + target); 1 for a constant.
    """

    categories: dict[str, list[str]]
    medians: dict[str, float]
    mean: dict[str, float]
    variance: dict[str, float]
    target_mean: float = 0.0
    target_scale: float = 1.0

    @property
    def sizes(self) -> dict[str, int]:
        """Categorical column -> number of indices, the unseen one included."""
        return {
            name: len(categories) + 1 for name, categories in self.categories.items()
        }

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


def feature_name(column: str) -> str:
    """Returns the name of a column's input, which layers and signatures can have."""
    name = re.sub(r"[^0-9A-Za-z_]", "_", column)
    taken = not name[:1].isalpha() or keyword.iskeyword(name) or name == "self"
    return f"column_{name}" if taken else name


def fit(data: config_dict.ConfigDict, rows) -> Encoder:
    """Returns the encoder of training rows; the others have no say in it.

    Args:
      data: `config.data`.
      rows: `tabular_data.Splits.train`.

    Raises:
      DataError: If a continuous column has no value at all.
    """
    numbers = rows[[*data.continuous_columns]]
    medians = numbers.median()
    if empty := [*medians.index[medians.isna()]]:
        raise errors.DataError(
            f"No training row has a value of {', '.join(map(repr, empty))}. Leave it "
            "out of config.data.continuous_columns."
        )
    table = _fill(numbers, medians)
    gaps = numbers.columns[numbers.isna().any()]
    table = table[[*numbers, *(_MISSING + name for name in gaps)]]
    table[data.target_column] = np.log1p(rows[data.target_column])
    mean = table.mean()
    # Of a constant the rounding of its mean would be the scale.
    variance = table.var(ddof=0).where(table.min() < table.max(), 1.0)
    target = mean.pop(data.target_column), variance.pop(data.target_column) ** 0.5
    columns = tabular_data.categorical_columns(data)
    return Encoder(
        {name: sorted(rows[name].unique()) for name in columns},
        medians.to_dict(),
        mean.to_dict(),
        variance.to_dict(),
        *map(float, target),
    )


def _fill(numbers, medians):
    """Returns the columns without gaps, and for each one a column of where they are."""
    gaps = numbers.isna().astype("float64").add_prefix(_MISSING)
    return numbers.fillna(medians).join(gaps)


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
    pd = extras.require("pandas")
    inputs = {  # The place of a category that is not there is -1.
        feature_name(name): pd.Index(categories).get_indexer(rows[name]).astype("int32")
        + 1
        for name, categories in encoder.categories.items()
    }
    if encoder.mean:
        continuous = _fill(rows[[*encoder.medians]], encoder.medians)
        inputs[CONTINUOUS] = continuous[[*encoder.mean]].to_numpy("float32")
    return inputs
