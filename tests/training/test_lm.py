"""The recurrent language model: perplexity, precision of its parts, whole runs."""

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp import hardware
from tfamp.precision import policy
from tfamp.training import (
    benchmark_inputs,
    callbacks,
    compare,
    lm,
    lm_config,
    run_files,
    train_and_evaluate,
)

TEXT = "".join(
    f"the {'red green blue'.split()[n % 3]} fox no {n * n % 31} sleeps\n"
    for n in range(300)
)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "foxes.txt").write_text(TEXT)
    return str(folder)


def make_config(data_dir, mode="float32"):
    config = lm_config.get_text_file_config()
    config.name = "foxes"
    config.data_dir = data_dir
    config.epochs, config.batch_size, config.eval_batch_size = 2, 32, 32
    config.optimizer.learning_rate = 0.02
    config.precision.mode = mode
    config.data.unit = "character"
    config.data.sequence_length = 16
    config.model.embedding_dim, config.model.units = 16, (24,)
    return config


# ---- Perplexity ----


def test_perplexity_is_of_all_tokens_of_all_batches():
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(6, 5, 11)).astype("float32")
    labels = generator.integers(11, size=(6, 5))
    with policy.policy_scope("mixed_float16"):
        metric = lm.Perplexity()
    for part in (slice(0, 4), slice(4, 6)):
        metric.update_state(labels[part], logits[part])
    exact = logits.astype("float64")
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    losses = -np.take_along_axis(exact, labels[..., None], axis=-1)
    assert float(metric.result()) == pytest.approx(np.exp(losses.mean()), rel=1e-5)
    assert {v.dtype for v in metric.variables} == {"float32"}
    assert metric.result().dtype == tf.float32
    copy = lm.Perplexity.from_config(metric.get_config())
    assert (copy.name, copy.dtype) == ("perplexity", "float32")


@pytest.mark.parametrize("logit", [math.nan, -1e30])
def test_perplexity_of_a_diverged_model_is_no_number_in_json(logit):
    logits = np.zeros((1, 2, 3), "float32")
    logits[0, 0, 0] = logit
    metric = lm.Perplexity()
    metric.update_state(np.zeros((1, 2), "int32"), logits)
    assert callbacks.json_number(metric.result()) is None


# ---- The model ----


@pytest.mark.parametrize("mode", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("float32_head", [False, True])
def test_loss_is_in_float32_and_the_head_as_asked(mode, float32_head):
    config = make_config("")
    config.model.units, config.model.float32_head = (8, 8), float32_head
    with policy.policy_scope(mode):
        model = lm.build_model(config, 40)
    dtype = mode.removeprefix("mixed_")
    assert model.output.dtype == "float32" and model.output.shape == (None, 16, 40)
    head = "float32" if float32_head else dtype
    assert model.get_layer("logits").compute_dtype == head
    for name in ("embedding", "lstm1", "lstm2"):
        assert model.get_layer(name).compute_dtype == dtype
    assert {weight.dtype for weight in model.trainable_weights} == {"float32"}


def test_unrolled_model_is_the_same():
    config = make_config("")
    tokens = np.random.default_rng(0).integers(40, size=(4, 16))
    outputs = []
    for config.model.unroll in (False, True):
        keras.utils.set_random_seed(3)
        model = lm.build_model(config, 40)
        outputs.append(model.predict_on_batch(tokens))
    np.testing.assert_allclose(*outputs, atol=1e-6)


@pytest.mark.parametrize(("embedding", "units"), [(0, (8,)), (8, ()), (8, (8, 0))])
def test_widths_below_one_are_refused(embedding, units):
    config = make_config("")
    config.model.embedding_dim, config.model.units = embedding, units
    for use in (benchmark_inputs.check, lm.create):
        with pytest.raises(ValueError, match="width of at least 1"):
            use(config)


def test_synthetic_batches_fit_the_model():
    config = make_config("")
    config.model.vocabulary_size = 40
    made = benchmark_inputs.create(config)
    assert made.unit == benchmark_inputs.unit("language_model") == "sequences"
    features, labels = next(iter(made.batches))
    assert features.shape == labels.shape == (32, 16)
    np.testing.assert_array_equal(features[:, 1:], labels[:, :-1])
    model = made.build_model()
    loss = float(made.loss(labels, model(features)))
    assert loss == pytest.approx(math.log(40), rel=0.01)  # It knows nothing yet.


def test_stateful_lstm_trains_in_float16():
    """https://github.com/keras-team/keras/issues/15140: states of another dtype."""
    with tfamp.policy_scope("mixed_float16"):
        lstm = keras.layers.LSTM(4, stateful=True, return_sequences=True)
        head = keras.layers.Dense(1, dtype="float32")
        model = keras.Sequential([keras.Input(batch_shape=(2, 3, 5)), lstm, head])
    model.compile(tfamp.wrap_optimizer(keras.optimizers.Adam()), "mse")
    features = np.ones((4, 3, 5), "float32")
    history = model.fit(features, np.zeros((4, 3, 1)), batch_size=2, verbose=0)
    assert np.isfinite(history.history["loss"][0])
    before = [np.array(state) for state in lstm.states]
    model.predict(features[:2], verbose=0)
    pairs = zip(lstm.states, before, strict=True)
    assert any((np.array(state) != old).any() for state, old in pairs)


# ---- Whole runs ----


@pytest.fixture(scope="module")
def compared(data_dir, tmp_path_factory):
    """float32, mixed_float16 without loss scaling, and with it."""
    folder = tmp_path_factory.mktemp("lm")
    config = make_config(data_dir, "mixed_float16")
    config.compare_unscaled = True
    return compare.compare(config, folder), folder


def test_comparison_has_three_columns_that_learn(compared):
    comparison, folder = compared
    names = ["float32", "mixed_float16, no loss scaling", "mixed_float16"]
    assert list(comparison.by_mode()) == names
    uniform = 32.0  # The vocabulary.
    for result in comparison.results:
        assert (result.score_name, result.errors) == ("perplexity", ["perplexity"])
        perplexity = result.score or math.nan
        assert 1.0 < perplexity < uniform / 2
        assert 0.0 < (result.scores["kept_gradients"] or math.nan) <= 1.0
        assert result.test_loss == pytest.approx(math.log(perplexity), rel=1e-5)
    base, _, scaled = comparison.results
    assert scaled.score == pytest.approx(base.score, rel=0.05)
    assert "% of perplexity" in comparison.to_text()
    assert comparison.export["nodes_checked"] > 0  # None of fewer than 32 bits.
    run_files.delete_run(folder / "float32/seed0")  # Nothing foreign among its files.


def test_run_keeps_what_the_format_makes_of_its_gradients(compared):
    _, folder = compared
    stored = json.loads((folder / "mixed_float16/seed0/underflow.json").read_text())
    assert (stored["format"], stored["loss_scale"]) == ("float16", 2.0**15)
    assert "| logits (" in (folder / "mixed_float16/seed0/underflow.md").read_text()
    rows = {row["name"]: row for row in stored["rows"]}
    assert {"embedding", "lstm1", "logits", "logits/kernel"} <= rows.keys()
    assert rows["logits"]["unscaled"]["values"] == 32 * 16 * 32
    for row in rows.values():
        assert row["scaled"]["underflow"] <= row["unscaled"]["underflow"]


def test_scale_that_is_too_small_loses_the_gradients(data_dir, tmp_path):
    config = make_config(data_dir, "mixed_float16")
    config.epochs, config.limit_examples = 1, 32
    config.precision.loss_scale.dynamic = False
    config.precision.loss_scale.initial_scale = 2.0**-14
    result = train_and_evaluate(config, tmp_path)
    kept = result.scores["kept_gradients"]
    assert kept is not None and kept < 0.2


def test_diverged_run_ends_with_a_result_that_says_so(data_dir, tmp_path):
    config = make_config(data_dir)
    config.epochs, config.limit_examples = 1, 64
    config.optimizer.learning_rate = 1e38
    config.optimizer.clip_global_norm = 0.0
    result = train_and_evaluate(config, tmp_path)
    assert result.scores == {"perplexity": None, "kept_gradients": None}
    assert result.test_loss is None
    json.loads((tmp_path / "underflow.json").read_text())


def test_part_of_a_batch_stands_for_the_whole(data_dir, monkeypatch):
    config = make_config(data_dir)
    task = lm.create(config, data_dir)
    model = task.build_model()
    model.compile("adam")
    whole = lm._measure_underflow(config, task.train, model)
    monkeypatch.setattr(lm, "_ELEMENTS", 8 * 16 * model.output.shape[-1])
    part = lm._measure_underflow(config, task.train, model)
    assert part.row("logits").unscaled.values == 8 * 16 * model.output.shape[-1]
    assert part.row("logits").largest == pytest.approx(
        whole.row("logits").largest, rel=0.01
    )
    assert {row.kind for row in part.rows} == {"activation"}


def test_interrupted_run_goes_on_with_the_same_losses(data_dir, tmp_path, monkeypatch):
    config = make_config(data_dir, "mixed_float16")
    config.limit_examples = 64
    train_and_evaluate(config, tmp_path / "whole")
    original = callbacks.AtomicBackup.on_epoch_end

    def killed(self, epoch, logs=None):
        original(self, epoch, logs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(callbacks.AtomicBackup, "on_epoch_end", killed)
        with pytest.raises(KeyboardInterrupt):
            train_and_evaluate(config, tmp_path / "killed")
    train_and_evaluate(config, tmp_path / "killed")
    whole, resumed = (
        [row["loss"] for row in run_files.read_metrics(tmp_path / name, "step")]
        for name in ("whole", "killed")
    )
    assert len(whole) == 4 and resumed == whole


@pytest.mark.skipif(
    not hardware.format_support("bfloat16", hardware.read_devices()).fast,
    reason="the bfloat16 rewrite needs a CPU with native bfloat16",
)
def test_graph_rewrite_converts_the_products(data_dir, tmp_path):
    config = make_config(data_dir, "mixed_bfloat16")
    config.epochs, config.limit_examples = 1, 32
    config.precision.graph_rewrite = True
    result = train_and_evaluate(config, tmp_path)
    assert "effective: bfloat16" in result.graph_rewrite
    stored = json.loads((tmp_path / "underflow.json").read_text())
    assert stored["format"] == "bfloat16"  # Though every layer says float32.
