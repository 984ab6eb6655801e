"""Scores of predicted amounts, which are never below 0."""

import numpy as np


def rmsle(target: np.ndarray, predicted: np.ndarray) -> float:
    """Returns the root mean squared error of log(1 + amount).

    Args:
      target: Amounts of at least 0, float64 [rows].
      predicted: The same.
    """
    return float(np.sqrt(np.mean((np.log1p(predicted) - np.log1p(target)) ** 2)))


def rmspe(target: np.ndarray, predicted: np.ndarray) -> float:
    """Returns the root mean squared error as a fraction of the amount.

    Rows whose target is 0 are left out, as in Kaggle's Rossmann competition; NaN if
    that leaves none.

    Args:
      target: Amounts of at least 0, float64 [rows].
      predicted: The same.

    References:
      https://www.kaggle.com/c/rossmann-store-sales, "Evaluation".
    """
    counts = target > 0
    if not counts.any():
        return float("nan")
    ratio = predicted[counts] / target[counts]
    return float(np.sqrt(np.mean((ratio - 1) ** 2)))
