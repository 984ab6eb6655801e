"""Regression on a table with entity embeddings, as of Rossmann's sales."""

import functools
import json
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf
from ml_collections import config_dict

from tfamp.training import (
    benchmark_inputs,
    pipeline,
    plots,
    run_files,
    tabular_columns,
    tabular_data,
    tabular_encoders,
    tabular_model,
    tabular_scores,
    tasks,
)

UNIT = "rows"
LOSSES = {
    "mean_squared_error": keras.losses.MeanSquaredError,
    "mean_absolute_error": keras.losses.MeanAbsoluteError,
}
_CATEGORIES = 100  # Of a column whose categories are counted nowhere, for timing.
_BATCHES = 8  # Different ones in a benchmark, again and again.
# "log_rmse", which selects the checkpoint, is "rmsle" before predictions below 0
# become 0.
ERRORS = frozenset({"rmsle", "rmspe", "log_rmse"})


def create(
    config: config_dict.ConfigDict,
    data_dir: str | None = None,
    manual_dir: str | None = None,
) -> tasks.Task:
    """Reads and encodes a table, and describes the network.

    The score is the root mean squared log error of the amounts (RMSLE), with the root
    mean squared percentage error (RMSPE); predictions below 0 count as 0. Scoring
    writes `predictions.png`, and `columns.json`, how rows become the model's inputs,
    into the run's folder.

    Args:
      config: `config.data` has what `tabular_data.load` reads, and
        baseline_columns: see `tabular_encoders.baseline`, whose score is reported.
        `config.model` has what `tabular_model.build_model` reads, and
        loss: one of `LOSSES`, of log(1 + target).
      data_dir: Folder of the files.
      manual_dir: Unused.

    Returns:
      A `Task`; features are those of `tabular_encoders.encode`, a label is
      log(1 + target), float32 [1].

    Raises:
      DataError: If the data are missing or malformed.
      ImportError: If an optional dependency is missing.
      ValueError: If a setting makes no sense.
    """
    del manual_dir
    _check(config)
    splits = tabular_data.load(config, data_dir)
    encoder = tabular_encoders.fit(splits.train)
    train, validation, test = (_dataset(encoder, rows) for rows in splits[:3])
    return tasks.Task(
        train=train,
        validation=validation if len(splits.validation.target) else None,
        test=test,
        build_model=lambda: tabular_model.build_model(config.model, encoder),
        loss=LOSSES[config.model.loss](),
        metrics=_metrics,
        description=_describe(config, splits, encoder),
        score=functools.partial(_score, config, splits, encoder),
        errors=ERRORS,
    )


def predict(
    model: keras.Model, inputs: tf.data.Dataset, batch_size: int = 4096
) -> np.ndarray:
    """Predicts amounts.

    Args:
      model: From `tabular_model.build_model`, or one of the same inputs and output.
      inputs: Unbatched dataset of the model's inputs.
      batch_size: Rows at a time.

    Returns:
      Amounts of at least 0, float64 [rows].
    """
    batches = pipeline.evaluation_batches(inputs, batch_size)
    # A bar on a terminal; a file has the trainer's lines.
    logs = model.predict(batches, verbose=1 if sys.stdout.isatty() else 0)
    return np.expm1(np.maximum(logs[:, 0].astype("float64"), 0.0))


def check_synthetic(config: config_dict.ConfigDict) -> None:
    """Raises ValueError for settings that make no sense; reads no data."""
    _check(config)
    tabular_columns.check_settings(config.data)


def synthetic(config: config_dict.ConfigDict) -> tasks.Synthetic:
    """Describes the model and makes batches of random rows for it.

    Args:
      config: As for `create`; `config.data.categories` has the numbers of categories,
        100 where a column is not there. `config.seed` alone decides on the content.
    """
    check_synthetic(config)
    given = dict(config.data.categories)
    columns = tabular_columns.categorical_columns(config.data)
    counts = {name: given.get(name, _CATEGORIES) for name in columns}
    numbers = len(config.data.continuous_columns)
    encoder = tabular_encoders.Encoder(
        vocabularies={n: list(map(str, range(1, c))) for n, c in counts.items()},
        medians={},
        indicators=[],
        mean=[0.0] * numbers,
        variance=[1.0] * numbers,
        target_mean=0.0,
        target_scale=1.0,
    )
    rng = np.random.default_rng(config.seed)
    shape = _BATCHES, config.batch_size
    inputs = {
        tabular_columns.feature_name(name): rng.integers(
            count, size=shape, dtype="int32"
        )
        for name, count in counts.items()
    }
    if numbers:
        values = rng.standard_normal((*shape, numbers), "float32")
        inputs[tabular_columns.CONTINUOUS] = values
    labels = rng.standard_normal((*shape, 1), "float32")
    return tasks.Synthetic(
        build_model=lambda: tabular_model.build_model(config.model, encoder),
        batches=benchmark_inputs.repeat(inputs, labels),
        description=f"{_describe_model(config, encoder)}; random rows",
        loss=LOSSES[config.model.loss](),
        metrics=_metrics,
        unit=UNIT,
    )


def _check(config):
    """Refuses settings of the model that make no sense, before any data are read."""
    model = config.model
    tabular_columns.check_pairs("model.embedding_sizes", model.embedding_sizes)
    tabular_columns.check_pairs("data.categories", config.data.categories)
    columns = tabular_columns.categorical_columns(config.data)
    sizes = {**dict(model.embedding_sizes), **dict(config.data.categories)}
    rules = {
        "model.dense_layers must be integers of at least 1": all(
            isinstance(units, int) and units >= 1 for units in model.dense_layers
        ),
        f"model.loss must be of {tuple(LOSSES)}": model.loss in LOSSES,
        "model.embedding_dropout must be in [0, 1)": 0 <= model.embedding_dropout < 1,
        "model.embedding_sizes and data.categories must be of categorical columns and "
        "at least 1": set(sizes) <= set(columns)
        and all(s >= 1 for s in sizes.values()),
    }
    wrong = [f"config.{words}" for words, holds in rules.items() if not holds]
    if wrong:
        raise ValueError(
            f"{'; '.join(wrong)}. Received: dense_layers={model.dense_layers!r}, "
            f"loss={model.loss!r}, embedding_dropout={model.embedding_dropout!r}, "
            f"embedding_sizes={model.embedding_sizes!r}, "
            f"categories={config.data.categories!r}; categorical columns {columns!r}."
        )


def _metrics() -> list[keras.metrics.Metric]:
    return [keras.metrics.RootMeanSquaredError(name="log_rmse")]


def _dataset(encoder, rows):
    labels = np.log1p(rows.target).astype("float32")[:, None]
    inputs = tabular_encoders.encode(encoder, rows)
    return tf.data.Dataset.from_tensor_slices((inputs, labels))


def _score(config, splits, encoder, model, folder: pathlib.Path):
    """Writes figure and columns, and returns the scores on the test split."""
    rows = splits.test
    inputs = tabular_encoders.encode(encoder, rows)
    predicted = predict(
        model, tf.data.Dataset.from_tensor_slices(inputs), config.eval_batch_size
    )
    scores = {
        "rmsle": tabular_scores.rmsle(rows.target, predicted),
        "rmspe": tabular_scores.rmspe(rows.target, predicted),
    }
    text = json.dumps(encoder.to_dict(), indent=2) + "\n"
    run_files.write_text(folder / "columns.json", text)
    plots.write_regression(
        folder,
        f"{config.name}: test split, RMSLE {scores['rmsle']:.3f}",
        config.data.target_column,
        rows.target,
        predicted,
        splits.ordered,
    )
    return scores


def _describe(config, splits, encoder):
    """Returns the report's line on table and network."""
    sizes = [len(rows.target) for rows in splits[:3]]
    columns = list(config.data.baseline_columns)
    simple = tabular_encoders.baseline(splits.train, splits.test, columns)
    error = tabular_scores.rmsle(splits.test.target, simple)
    grouped = f" by {', '.join(columns)}" if columns else ""
    unseen = tabular_encoders.count_unseen(encoder, splits.test)
    zeros = int((splits.test.target == 0).sum())
    parts = [
        f"Regression of {config.data.target_column}, {config.data.name}",
        "{} train / {} validation / {} test rows".format(*sizes) + _times(splits),
        f"mean log target{grouped}: RMSLE {error:.4f}",
        *(f"{n} test rows with a new {name}" for name, n in unseen.items()),
        *([f"RMSPE without {zeros} test rows of target 0"] if zeros else []),
        *splits.notes,
        _describe_model(config, encoder),
    ]
    return "; ".join(parts) + "."


def _times(splits):
    """Returns when validation and test rows begin."""
    if not splits.ordered:
        return ", drawn"
    found = [rows.time[0] for rows in splits[1:3] if len(rows.time)]
    return f", from {' and '.join(found)} on"


def _describe_model(config, encoder):
    model = config.model
    given = dict(model.embedding_sizes)
    sizes = [
        given.get(name) or tabular_model.embedding_size(count)
        for name, count in encoder.sizes.items()
    ]
    units = "-".join(map(str, (*model.dense_layers, 1)))
    return (
        f"{len(sizes)} embeddings of {sum(sizes)} units and {len(encoder.mean)} "
        f"continuous columns, dense layers {units}"
    )
