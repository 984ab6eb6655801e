"""The network of a table: where it is float32, how it is scored, whole comparisons."""

import json

import helpers
import keras
import numpy as np
import pandas
import pytest
import tensorflow as tf
from sklearn import metrics

import tfamp
from tfamp.recipes import figures, tabular, tabular_data, tabular_encoding
from tfamp.recipes.tasks import tabular as regression
from tfamp.runs import compare, run_files, trained

EFFECTS = {"a": 0.0, "b": 1.5, "c": 3.0, "": 2.0}  # Of a shop on the log of its sales.


def make_config(folder):
    """A table whose log target is the shop's effect and the distance's."""
    rng = np.random.default_rng(0)
    lines = ["day,shop of,distance,sold"]
    for day in range(240):
        shop = list(EFFECTS)[rng.integers(4)]
        distance = rng.integers(100, 90_000)
        log = EFFECTS[shop] + distance / 45_000 + rng.normal(scale=0.1)
        sold = 0 if day == 239 else np.expm1(log) if log > 0 else 0.0
        date = np.datetime64("2020-01-01") + day
        lines.append(f"{date},{shop},{distance},{sold:.6f}")
    (folder / "sold.csv").write_text("\n".join(lines) + "\n")
    return helpers.configured(tabular, data_dir=str(folder), **FIELDS)


FIELDS = {
    **{"name": "sold", "epochs": 6, "batch_size": 32, "optimizer__learning_rate": 1e-2},
    **{"precision__mode": "mixed_bfloat16", "data__table_file": "sold.csv"},
    **{"data__target_column": "sold", "data__categorical_columns": ("shop of",)},
    **{"data__continuous_columns": ("distance",), "data__date_column": "day"},
    **{"data__time_columns": ("day",), "data__baseline_columns": ("shop of",)},
    **{"data__categories": (("shop of", 5),), "model__dense_layers": (32, 16)},
    **{"model__dropout": 0.01, "model__embedding_dropout": 0.01},
}


@pytest.fixture
def config(tmp_path):
    return make_config(tmp_path)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison, its configuration and folder."""
    folder = tmp_path_factory.mktemp("compared")
    config = make_config(folder)
    return compare.compare(config, folder / "runs"), config, folder / "runs"


def predict(run, config, splits):
    """Returns amounts of the test split, from the saved model and plain NumPy."""
    encoder = tabular_encoding.fit(config.data, splits.train)
    inputs = tabular_encoding.encode(encoder, splits.test)
    model = keras.models.load_model(run / "model.keras", compile=False)
    logs = model.predict(inputs, verbose=0)[:, 0].astype("float64")
    return np.expm1(np.maximum(logs, 0))


# ---- The network ----


def test_embedding_size_follows_the_rule_of_thumb():
    # As fast.ai's course has them for Rossmann's stores, days, years, months.
    sizes = {1116: 81, 8: 5, 4: 3, 13: 7, 32: 11, 100_000: 600}
    assert {n: regression.embedding_size(n) for n in sizes} == sizes


@pytest.mark.parametrize("mode", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_normalization_and_output_are_float32_in_every_mode(config, mode):
    task = tabular.create(config)
    with tfamp.policy_scope(mode):
        model = task.build_model()
    compute = {"float32": "float32", "mixed_bfloat16": "bfloat16"}.get(mode, "float16")
    dtypes = {layer.name: layer.compute_dtype for layer in model.layers}
    assert dtypes["normalization"] == dtypes["standardized"] == "float32"
    assert dtypes["log_target"] == "float32"
    assert dtypes["dense1"] == dtypes["embedding_shop_of"] == compute
    assert model.output.dtype == "float32"
    assert all(v.dtype == "float32" for v in model.trainable_variables)
    # Beyond float16's range before the normalization, and a category never seen.
    inputs = {
        "shop_of": np.array([0, 4], "int32"),
        "continuous": np.array([[90_000.0], [100.0]], "float32"),
    }
    probe = keras.Model(model.inputs, model.get_layer("normalization").output)
    values = task.train.map(lambda x, y: x["continuous"]).batch(1000)
    known = next(iter(values)).numpy()
    normalized = keras.ops.convert_to_numpy(probe(inputs))
    expected = (inputs["continuous"] - known.mean()) / known.std()
    np.testing.assert_allclose(normalized, expected, rtol=1e-5)
    assert np.isfinite(keras.ops.convert_to_numpy(model(inputs))).all()


def test_untrained_network_predicts_about_the_mean_with_embeddings_as_given(config):
    config.model.embedding_sizes = (("shop of", 7),)
    task = tabular.create(config)
    model = task.build_model()
    assert model.get_layer("embedding_shop_of").embeddings.shape == (5, 7)
    kernel = model.get_layer("standardized").kernel
    kernel.assign(keras.ops.zeros_like(kernel))
    inputs, labels = next(iter(task.train.batch(1000)))
    logs = keras.ops.convert_to_numpy(model(inputs))
    np.testing.assert_allclose(logs, labels.numpy().mean(), rtol=1e-5)


@pytest.mark.parametrize("kind", ["categorical", "continuous"])
def test_one_kind_of_columns_is_enough(config, kind):
    config.data[f"{kind}_columns"] = ()
    config.data.baseline_columns = config.data.categories = ()
    task = tabular.create(config)
    inputs, _ = next(iter(task.test.batch(3)))
    assert task.build_model()(inputs).shape == (3, 1) and len(inputs) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data.name": "tables"}, "'diabetes'. Received: data.name='tables'"),
        ({"data.target_column": "distance"}, "target_column must not be a feature"),
        (
            {"data.categorical_columns": (), "data.continuous_columns": ()},
            "must name a column",
        ),
        ({"data.categorical_columns": ("a b", "a-b")}, "names must differ"),
        ({"data.categorical_columns": ("continuous",)}, "names must differ"),
        ({"data.fill_missing": "mean"}, "fill_missing must be"),
        ({"model.loss": "poisson"}, "model.loss must be of"),
        ({"model.embedding_sizes": (("distance", 3),)}, "must be of categorical"),
    ],
)
def test_setting_without_sense_is_an_error_before_reading(config, settings, message):
    config.update_from_flattened_dict({"data_dir": "/nowhere", **settings})
    for make in (tabular.create, tabular.synthetic):
        with pytest.raises(ValueError, match=message):
            make(config)


# ---- Whole runs ----


def test_comparison_scores_both_modes_as_scikit_learn_does(compared):
    result, config, folder = compared
    splits = tabular_data.load(config)
    columns = config.data.baseline_columns
    simple = tabular_data.baseline(config.data, splits.train, splits.test, columns)
    target = splits.test["sold"].to_numpy()
    simple = metrics.root_mean_squared_log_error(target, simple)
    assert [row.mode for row in result.results] == ["float32", "mixed_bfloat16"]
    for row in result.results:
        amounts = predict(folder / row.mode / "seed0", config, splits)
        expected = metrics.root_mean_squared_log_error(target, amounts)
        assert row.score_name == "rmsle"
        assert row.score == pytest.approx(expected, rel=1e-5)
        assert row.score < 0.8 * simple < row.chance and not row.at_chance
        assert list(row.scores) == ["rmsle", "rmspe", "log_rmse"]
        assert row.scores["log_rmse"] >= row.score * (1 - 1e-5)
        assert sorted(row.errors) == ["log_rmse", "rmsle", "rmspe"]
        positive = target > 0
        error = metrics.mean_squared_error(
            np.ones(positive.sum()), amounts[positive] / target[positive]
        )
        assert row.scores["rmspe"] == pytest.approx(error**0.5, rel=1e-5)
        epochs = run_files.read_metrics(folder / row.mode / "seed0", "epoch")
        lowest = min(epoch["val_log_rmse"] for epoch in epochs)
        assert row.best_validation_score == lowest
        for words in (
            f"mean log target by shop of: RMSLE {simple:.4f}",
            "173 train / 19 validation / 48 test rows",
            "from 2020-06-22 and 2020-07-11 on",
            "RMSPE without 1 test rows of target 0",
        ):
            assert words in row.description


def test_run_keeps_what_prepares_rows_for_its_model(compared):
    _, config, folder = compared
    run = folder / "mixed_bfloat16" / "seed0"
    columns = json.loads((run / "columns.json").read_text())
    assert columns["categories"] == {"shop of": ["", "a", "b", "c"]}
    assert columns["inputs"] == {"shop of": "shop_of"} and columns["unseen"] == 0
    assert columns["continuous"] == ["distance"]
    assert (run / "predictions.png").read_bytes().startswith(b"\x89PNG")
    # The export takes them by name.
    served = tf.saved_model.load(folder / "export").signatures["serving_default"]
    found = served(
        shop_of=tf.constant([4], tf.int32), continuous=tf.constant([[45_000.0]])
    )
    (log,) = found.values()
    assert float(log[0, 0]) == pytest.approx(EFFECTS["c"] + 1, abs=0.6)


def test_new_rows_are_predicted_from_text_without_target_and_time(compared):
    _, config, folder = compared
    run = folder / "float32" / "seed0"
    (folder / "new.csv").write_text("shop of,distance\nc,45000\n,7\nz,120\n")
    count, _ = trained.predict(config, run, folder / "new.csv", folder / "found.tsv")
    found = pandas.read_csv(folder / "found.tsv", sep="\t")
    assert count == 3 and list(found) == ["shop of", "distance", "predicted_sold"]
    assert np.log1p(found.predicted_sold[0]) == pytest.approx(EFFECTS["c"] + 1, abs=0.6)
    (folder / "new.csv").write_text("shop of,distance\nc,near\n")
    with pytest.raises(tfamp.DataError, match="row 1: column 'distance'.*near"):
        trained.predict(config, run, folder / "new.csv", folder / "found.tsv")


def test_diverged_model_has_a_score_of_no_number(config, tmp_path):
    task = tabular.create(config)
    model = task.build_model()
    model.get_layer("standardized").bias.assign([np.nan])
    assert np.isnan([*task.score(model, tmp_path).values()]).all()
    assert np.isnan(regression.rmspe(np.zeros(2), np.ones(2)))  # No row counts.


def test_synthetic_batches_fit_the_model_of_the_data(config):
    made = tabular.synthetic(config)
    task = tabular.create(config)
    batch, labels = next(iter(made.batches))
    expected, real = next(iter(task.train.batch(config.batch_size)))
    assert batch.keys() == expected.keys()
    for name, value in batch.items():
        assert value.shape == expected[name].shape
        assert value.dtype == expected[name].dtype
    assert (labels.shape, labels.dtype) == (real.shape, real.dtype)
    shapes = [
        [tuple(weight.shape) for weight in model.weights]
        for model in (made.build_model(), task.build_model())
    ]
    assert shapes[0] == shapes[1]
    config.data.categories = ()
    table = tabular.synthetic(config).build_model().get_layer("embedding_shop_of")
    assert table.embeddings.shape[0] == 100


@pytest.mark.parametrize("ordered", [True, False])
def test_figure_shows_every_row_and_the_last_ones_over_time(ordered):
    target, predicted = np.arange(500.0), np.arange(500.0) + 1
    figure = figures.regression_figure("sold", "sold", target, predicted, ordered)
    points, *lines = figure.axes
    assert points.collections[0].get_offsets().shape == (500, 2)
    assert points.get_xlabel() == "true sold" and len(lines) == int(ordered)
    for axes in lines:
        true, guess = axes.get_lines()
        assert list(true.get_ydata()) == list(target[-336:])
        assert list(guess.get_ydata()) == list(predicted[-336:])
        assert list(true.get_xdata()) == list(range(164, 500))
