"""What the training rows say of the others: categories, medians, scales."""

from typing import Any, NamedTuple

import numpy as np

from tfamp import errors
from tfamp.training import tabular_columns, tabular_data

UNSEEN = 0  # Index of every category that no training row has.
# What the model can normalize in float32. Keras divides by no less than 1e-7, and at
# 1e5 standard deviations from 0 neighboring numbers are 0.008 of one apart.
_SMALLEST_SCALE = 1e-6
_LARGEST_SCALE = float(np.finfo("float32").max) ** 0.5
_LARGEST_OFFSET = 1e5


class Encoder(NamedTuple):
    """From rows to a model's inputs.

    Attributes:
      vocabularies: Categorical column -> its categories, sorted; the index of one is
        its position from 1.
      medians: Continuous column -> median of the training rows, which stands for a
        missing value.
      indicators: Continuous columns that some training row has no value of.
      mean: Of each continuous input, the indicators last.
      variance: The same; 1 for a constant.
      target_mean: Of log(1 + target).
      target_scale: Standard deviation of log(1 + target); 1 for a constant.
    """

    vocabularies: dict[str, list[str]]
    medians: dict[str, float]
    indicators: list[str]
    mean: list[float]
    variance: list[float]
    target_mean: float
    target_scale: float

    @property
    def sizes(self) -> dict[str, int]:
        """Categorical column -> number of indices, the unseen one included."""
        return {name: len(found) + 1 for name, found in self.vocabularies.items()}

    def to_dict(self) -> dict[str, Any]:
        """Returns what one needs to prepare other rows for the model, for JSON."""
        inputs = {
            name: tabular_columns.feature_name(name) for name in self.vocabularies
        }
        return {
            "categories": self.vocabularies,
            "unseen": UNSEEN,
            "inputs": inputs,
            tabular_columns.CONTINUOUS: [
                *self.medians,
                *map(_missing, self.indicators),
            ],
            "medians": self.medians,
            "output": "log(1 + target)",
        }


def _missing(name):
    return f"{name}_missing"


def fit(rows: tabular_data.Rows) -> Encoder:
    """Returns the encoder of training rows; the others have no say in it.

    Args:
      rows: Training rows, at least one.

    Raises:
      DataError: If a continuous column has no value at all, or one of a scale that
        float32 has no room for.
      ImportError: If scikit-learn is missing.
    """
    medians = {name: _median(name, values) for name, values in rows.numbers.items()}
    indicators = [name for name, v in rows.numbers.items() if np.isnan(v).any()]
    numbers = _numbers(rows, medians, indicators)
    mean, scale = _standardize(numbers)
    _check_scales([*medians, *map(_missing, indicators)], numbers, mean, scale)
    target_mean, target_scale = _standardize(np.log1p(rows.target)[:, None])
    return Encoder(
        vocabularies={
            name: sorted(set(values)) for name, values in rows.categories.items()
        },
        medians=medians,
        indicators=indicators,
        mean=mean.tolist(),
        variance=(scale**2).tolist(),
        target_mean=target_mean.item(),
        target_scale=target_scale.item(),
    )


def encode(encoder: Encoder, rows: tabular_data.Rows) -> dict[str, np.ndarray]:
    """Returns the model's inputs.

    Args:
      encoder: From `fit`.
      rows: Rows of the same columns.

    Returns:
      Input -> int32 [rows] for each categorical column, and "continuous" -> float32
      [rows, columns], not normalized, which the model does; none where there is no
      such column.
    """
    inputs = {}
    for name, known in encoder.vocabularies.items():
        index = {value: place for place, value in enumerate(known, UNSEEN + 1)}
        found = [index.get(value, UNSEEN) for value in rows.categories[name]]
        inputs[tabular_columns.feature_name(name)] = np.array(found, "int32")
    if encoder.mean:
        numbers = _numbers(rows, encoder.medians, encoder.indicators)
        inputs[tabular_columns.CONTINUOUS] = numbers.astype("float32")
    return inputs


def count_unseen(encoder: Encoder, rows: tabular_data.Rows) -> dict[str, int]:
    """Returns how many rows have a category that no training row has, by column."""
    counts = {
        name: sum(value not in known for value in rows.categories[name])
        for name, known in ((n, set(v)) for n, v in encoder.vocabularies.items())
    }
    return {name: count for name, count in counts.items() if count}


def _median(name, values):
    known = values[~np.isnan(values)]
    if not len(known):
        raise errors.DataError(
            f"Column {name!r} is empty in all {len(values)} training rows. Leave it "
            "out of config.data.continuous_columns."
        )
    return float(np.median(known))


def _check_scales(names, numbers, means, scales):
    """Refuses columns that are not normalized, or lose their digits, in float32."""
    for name, values, mean, scale in zip(names, numbers.T, means, scales, strict=True):
        fits = _SMALLEST_SCALE <= scale <= _LARGEST_SCALE
        if (values == values[0]).all() or fits and abs(mean) / scale <= _LARGEST_OFFSET:
            continue
        raise errors.DataError(
            f"Column {name!r} cannot be normalized in float32. Received: mean "
            f"{mean:.6g}, standard deviation {scale:.6g} of the training rows. "
            f"Expected: a standard deviation from {_SMALLEST_SCALE:g} to "
            f"{_LARGEST_SCALE:.2g}, a mean within {_LARGEST_OFFSET:g} of them from 0. "
            "Rescale the column, or subtract a constant from it."
        )


def _numbers(rows, medians, indicators):
    """Returns float64 [rows, columns]; missing values filled, indicators last."""
    columns = [
        np.where(np.isnan(rows.numbers[name]), median, rows.numbers[name])
        for name, median in medians.items()
    ]
    columns += [np.isnan(rows.numbers[name]).astype(float) for name in indicators]
    return np.stack(columns, axis=1) if columns else np.zeros((len(rows.target), 0))


def _standardize(values):
    """Returns mean and standard deviation of each column, 1 for a constant one."""
    if not values.shape[1]:
        return np.zeros(0), np.zeros(0)
    try:
        from sklearn import preprocessing
    except ImportError as e:
        raise ImportError('Install scikit-learn: pip install "tfamp[data]".') from e
    scaler = preprocessing.StandardScaler().fit(values)
    return scaler.mean_, scaler.scale_


def baseline(
    train: tabular_data.Rows, test: tabular_data.Rows, columns: list[str]
) -> np.ndarray:
    """Predicts what any model should better: means of the training rows.

    Args:
      train: Training rows.
      test: Rows to predict.
      columns: Categorical columns; none: one mean for all.

    Returns:
      The exponential of the mean log(1 + target), less 1, over the training rows that
      have the same values in `columns`; over all where there is none. float64 [rows].
    """
    logs = np.log1p(train.target)
    sums: dict[tuple, list[float]] = {}
    for key, value in zip(_keys(train, columns), logs, strict=True):
        sums.setdefault(key, []).append(value)
    means = {key: float(np.mean(values)) for key, values in sums.items()}
    whole = float(logs.mean())
    found = [means.get(key, whole) for key in _keys(test, columns)]
    return np.expm1(np.array(found))


def _keys(rows, columns):
    if not columns:
        return [()] * len(rows.target)
    return list(zip(*(rows.categories[name] for name in columns), strict=True))
