"""Regression on a table with entity embeddings, as of Rossmann's sales."""

import functools
import json
import pathlib

import keras
import numpy as np
from ml_collections import config_dict

from tfamp import extras
from tfamp.recipes import data, figures, tabular_data, tabular_encoding
from tfamp.runs import plots, tasks

LOSSES = {
    "mean_squared_error": keras.losses.MeanSquaredError,
    "mean_absolute_error": keras.losses.MeanAbsoluteError,
}
_CATEGORIES = 100  # Of a column whose categories are counted nowhere, for timing.
# "log_rmse", which selects the checkpoint, is "rmsle" before predictions below 0
# become 0.
ERRORS = frozenset({"rmsle", "rmspe", "log_rmse"})


def create(config: config_dict.ConfigDict) -> tasks.Task:
    """As `tfamp.recipes.tabular.create` says."""
    _check(config)
    splits = tabular_data.load(config)
    encoder = tabular_encoding.fit(config.data, splits.train)

    def encoded(rows):
        labels = np.log1p(rows[[config.data.target_column]].to_numpy())
        inputs = tabular_encoding.encode(encoder, rows)
        return data.slices((inputs, labels.astype("float32")))

    return tasks.Task(
        train=encoded(splits.train),
        validation=encoded(splits.validation) if len(splits.validation) else None,
        test=encoded(splits.test),
        build_model=lambda: build_model(config.model, encoder),
        loss=LOSSES[config.model.loss](),
        metrics=_metrics,
        description=_describe(config, splits, encoder),
        score=functools.partial(_score, config, splits, encoder),
        errors=ERRORS,
        chance=_simple(config, splits, ()),
        predict=functools.partial(_predict, config, encoder),
        assets={"columns.json": json.dumps(encoder.to_dict(), indent=2) + "\n"},
    )


def synthetic(config: config_dict.ConfigDict) -> tasks.Synthetic:
    """As `tfamp.recipes.tabular.synthetic` says."""
    _check(config)
    columns = tabular_data.categorical_columns(config.data)
    categories, numbers = dict(config.data.categories), config.data.continuous_columns
    counts = {name: categories.get(name, _CATEGORIES) for name in columns}
    encoder = tabular_encoding.Encoder(
        categories={n: [str(i) for i in range(1, c)] for n, c in counts.items()},
        medians={},
        mean=dict.fromkeys(numbers, 0.0),
        variance=dict.fromkeys(numbers, 1.0),
    )
    rng = np.random.default_rng(config.seed)
    shape = tasks.BATCHES, config.batch_size
    inputs = {
        tabular_encoding.feature_name(name): rng.integers(
            count, size=shape, dtype="int32"
        )
        for name, count in counts.items()
    }
    if numbers:
        values = rng.standard_normal((*shape, len(numbers)), "float32")
        inputs[tabular_encoding.CONTINUOUS] = values
    return tasks.Synthetic(
        build_model=lambda: build_model(config.model, encoder),
        batches=data.repeat(inputs, rng.standard_normal((*shape, 1), "float32")),
        description=f"{_describe_model(config, encoder)}; random rows",
        loss=LOSSES[config.model.loss](),
        metrics=_metrics,
        unit="rows",
    )


def _check(config):
    """Refuses what would train on the target, lose a column or be ignored."""
    data, model = config.data, config.model
    columns = tabular_data.categorical_columns(data)
    features = [*columns, *data.continuous_columns]
    names = [*map(tabular_encoding.feature_name, features), tabular_encoding.CONTINUOUS]
    rules = {
        "data.name must be 'table' or 'diabetes'": data.name in ("table", "diabetes"),
        "data.target_column must not be a feature": data.target_column not in features,
        "data.categorical_columns or continuous_columns must name a column": features,
        "the features' names must differ, also from 'continuous'": len(set(names))
        == len(names),
        "data.fill_missing must be 'raise' or 'median'": data.fill_missing
        in ("raise", "median"),
        f"model.loss must be of {tuple(LOSSES)}": model.loss in LOSSES,
        "model.embedding_sizes and data.categories must be of categorical columns": {
            *dict(model.embedding_sizes),
            *dict(data.categories),
        }
        <= {*columns},
    }
    if wrong := [words for words, holds in rules.items() if not holds]:
        raise ValueError(
            f"Of config: {'; '.join(wrong)}. Received: {data.name=}, "
            f"{data.target_column=}, {features=}, {data.fill_missing=}, {model.loss=}, "
            f"{model.embedding_sizes=}, {data.categories=}."
        )


def _metrics() -> list[keras.metrics.Metric]:
    return [keras.metrics.RootMeanSquaredError(name="log_rmse")]


def build_model(
    model: config_dict.ConfigDict, encoder: tabular_encoding.Encoder
) -> keras.Model:
    """Builds the network under the dtype policy in force.

    Every categorical column has an embedding; they and the normalized continuous
    columns go through dense layers with ReLU. Normalization and the output are in
    float32 in every mode: a distance in meters overflows float16, and the steps of a
    year do not survive bfloat16's 8 bits of precision.

    Args:
      model: Config with `dense_layers` (units), `dropout` after each of them,
        `embedding_dropout`, and `embedding_sizes`, pairs of a column and its size; see
        `embedding_size` for the others.
      encoder: Categories and scales.

    Returns:
      A functional model from `tabular_encoding.encode`'s inputs to float32 [batch, 1]:
      log(1 + target).

    References:
      Guo and Berkhahn, "Entity Embeddings of Categorical Variables", 2016,
      https://arxiv.org/abs/1604.06737.
    """
    layers, inputs, parts = keras.layers, {}, []
    sizes = _embedding_sizes(model, encoder)
    for column, count in encoder.sizes.items():
        name = tabular_encoding.feature_name(column)
        inputs[name] = keras.Input((), dtype="int32", name=name)
        x = layers.Embedding(count, sizes[column], name=f"embedding_{name}")
        x = x(inputs[name])
        if model.embedding_dropout:
            rate = model.embedding_dropout
            x = layers.Dropout(rate, name=f"embedding_dropout_{name}")(x)
        parts.append(x)
    if encoder.mean:
        name = tabular_encoding.CONTINUOUS
        inputs[name] = keras.Input((len(encoder.mean),), dtype="float32", name=name)
        normalize = layers.Normalization(
            mean=list(encoder.mean.values()),
            variance=list(encoder.variance.values()),
            dtype="float32",
            name="normalization",
        )
        parts.append(normalize(inputs[name]))
    x = layers.Concatenate(name="features")(parts) if parts[1:] else parts[0]
    for number, units in enumerate(model.dense_layers, 1):
        x = layers.Dense(units, activation="relu", name=f"dense{number}")(x)
        if model.dropout:
            x = layers.Dropout(model.dropout, name=f"dropout{number}")(x)
    x = layers.Dense(1, dtype="float32", name="standardized")(x)
    rescale = layers.Rescaling(
        encoder.target_scale, encoder.target_mean, dtype="float32", name="log_target"
    )
    return keras.Model(inputs, rescale(x), name="entity_embeddings")


def embedding_size(categories: int) -> int:
    """Returns the default size of an embedding: min(600, round(1.6 n^0.56)).

    Args:
      categories: Number of categories, the unseen one included.

    References:
      fast.ai, `emb_sz_rule`, https://docs.fast.ai/tabular.model.html.
    """
    return min(600, round(1.6 * categories**0.56))


def _embedding_sizes(model, encoder):
    """Returns the size of each categorical column's embedding."""
    sizes = dict(model.embedding_sizes)
    return {
        name: sizes.get(name) or embedding_size(count)
        for name, count in encoder.sizes.items()
    }


def rmsle(target: np.ndarray, predicted: np.ndarray) -> float:
    """Returns the root mean squared error of log(1 + amount), of amounts from 0 on."""
    return float(np.sqrt(np.mean((np.log1p(predicted) - np.log1p(target)) ** 2)))


def rmspe(target: np.ndarray, predicted: np.ndarray) -> float:
    """Returns the root mean squared error as a fraction of the amount.

    Rows whose target is 0 are left out, as in Kaggle's Rossmann competition; NaN if
    that leaves none. https://www.kaggle.com/c/rossmann-store-sales, "Evaluation".
    """
    counts = target > 0
    if not counts.any():
        return float("nan")
    ratio = predicted[counts] / target[counts]
    return float(np.sqrt(np.mean((ratio - 1) ** 2)))


def _predict(config, encoder, model, rows, folder):
    """Returns the targets of new rows; see `tasks.Task`."""
    pandas = extras.require("pandas")
    parsed = tabular_data.parse(config, rows)
    name = f"predicted_{config.data.target_column}"
    return pandas.DataFrame({name: _amounts(config, encoder, parsed, model)})


def _amounts(config, encoder, rows, model):
    """Returns the predicted targets, float64 [rows]; below 0 there are none."""
    logs = data.predict(model, tabular_encoding.encode(encoder, rows), config)
    return np.expm1(np.maximum(logs[:, 0].astype("float64"), 0.0))


def _score(config, splits, encoder, model, folder: pathlib.Path):
    """Draws the predictions, and returns the scores on the test split."""
    target = splits.test[config.data.target_column].to_numpy()
    predicted = _amounts(config, encoder, splits.test, model)
    scores = {"rmsle": rmsle(target, predicted), "rmspe": rmspe(target, predicted)}
    plots.write(
        folder / figures.PREDICTIONS,
        figures.regression_figure,
        f"{config.name}: test split, RMSLE {scores['rmsle']:.3f}",
        config.data.target_column,
        target,
        predicted,
        bool(splits.starts),
    )
    return scores


def _describe(config, splits, encoder):
    """Returns the report's line on table and network."""
    data, test = config.data, splits.test
    sizes = [len(rows) for rows in (splits.train, splits.validation, test)]
    times = f"from {' and '.join(splits.starts)} on" if splits.starts else "drawn"
    groups = " by " * bool(data.baseline_columns) + ", ".join(data.baseline_columns)
    target = test[data.target_column].to_numpy()
    simple = _simple(config, splits, data.baseline_columns)
    unseen = {
        name: (~test[name].isin(training_values)).sum()
        for name, training_values in encoder.categories.items()
    }
    zeros = (target == 0).sum()
    columns = [*encoder.categories, *encoder.medians]
    seen = len(test.merge(splits.train[columns].drop_duplicates(), on=columns))
    parts = [
        f"Regression of {data.target_column}, {data.name}",
        "{} train / {} validation / {} test rows, ".format(*sizes) + times,
        f"mean log target{groups}: RMSLE {simple:.4f}",
        *(f"{n} test rows with a new {name}" for name, n in unseen.items() if n),
        *([f"RMSPE without {zeros} test rows of target 0"] if zeros else []),
        *([f"{seen} test rows have the features of a training row"] if seen else []),
        *splits.notes,
        _describe_model(config, encoder),
    ]
    return "; ".join(parts) + "."


def _simple(config, splits, columns):
    """Returns the RMSLE of the mean log target, of each group of some columns."""
    target = splits.test[config.data.target_column].to_numpy()
    parts = splits.train, splits.test
    return rmsle(target, tabular_data.baseline(config.data, *parts, columns))


def _describe_model(config, encoder):
    sizes = _embedding_sizes(config.model, encoder).values()
    units = "-".join(map(str, (*config.model.dense_layers, 1)))
    return (
        f"{len(sizes)} embeddings of {sum(sizes)} units and {len(encoder.mean)} "
        f"continuous columns, dense layers {units}"
    )
