"""The recurrent language model: text to windows, precision of its parts, whole runs."""

import json
import math
import re
import sys

import helpers
import keras
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

import tfamp
from tfamp.facts import hardware
from tfamp.precision import policy
from tfamp.recipes import language_model
from tfamp.recipes.tasks import language_model as modeling
from tfamp.recipes.texts import language_data
from tfamp.runs import compare, run_files, tasks, trained
from tfamp.training import train_and_evaluate

TEXT = "".join(
    f"the {'red green blue'.split()[n % 3]} fox no {n * n % 31} sleeps\n"
    for n in range(300)
)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "foxes.txt").write_text(TEXT)
    return str(folder)


# Those of a few characters would be in float32, as small outputs are.
LOW_LOGITS = (("logits", "mixed_float16"),)


FIELDS = {
    **{"name": "foxes", "epochs": 2, "batch_size": 32, "eval_batch_size": 32},
    **{"optimizer__learning_rate": 0.02, "data__unit": "character"},
    **{"data__sequence_length": 16, "model__embedding_dim": 16},
    **{"model__units": (24,), "model__dropout": 0.0, "model__vocabulary_size": 200},
}


def make_config(data_dir="", mode="float32", **fields):
    given = {**FIELDS, "data_dir": str(data_dir), "precision__mode": mode, **fields}
    return helpers.configured(language_model, "text_file", **given)


# ---- Text to windows ----


@given(st.integers(0, 60), st.integers(1, 9))
def test_windows_predict_each_token_once(tokens, length):
    windows = language_data.cut(np.arange(tokens, dtype="int32"), length)
    predicted = windows[:, 1:].reshape(-1)
    assert predicted.tolist() == list(range(1, len(predicted) + 1))
    assert tokens - 1 - len(predicted) < length
    np.testing.assert_array_equal(windows[:, :-1].reshape(-1), predicted - 1)


@given(st.text(" \nab", max_size=99), st.floats(0, 0.5))
def test_text_is_split_in_its_order_behind_white_space(text, validation):
    parts = language_data.split(text, validation, 0.25)
    assert "".join(parts.values()) == text
    assert list(parts) == ["train", *["validation"] * (validation > 0), "test"]
    longest = max(map(len, text.split()), default=0)
    assert abs(len(parts["test"]) - 0.25 * len(text)) <= longest + 2
    if text[-1:].isspace():
        assert all(part[-1:].isspace() for part in parts.values() if part)


def test_text_without_spaces_is_split_too():
    parts = language_data.split("a" * 100, 0.25, 0.2)
    assert [len(part) for part in parts.values()] == [60, 20, 20]


@pytest.mark.parametrize("unit", ["character", "wordpiece"])
def test_tokenizer_json_tells_what_ids_stand_for(tmp_path, unit):
    """A file in two, read in the order of their names, comes back from its ids."""
    half = TEXT.index("\n", len(TEXT) // 2) + 1
    (tmp_path / "b.txt").write_text(TEXT[half:].replace("sleeps", "Schl\u00e4ft!"))
    (tmp_path / "a.txt").write_text("\ufeff" + TEXT[:half], encoding="utf-8")
    (tmp_path / "c.md").write_text("not this one")
    config = make_config(tmp_path, data__unit=unit, validation_fraction=0.0)
    text = language_data.read(config)
    assert "2 file(s)" in text.note and list(text.windows) == ["train", "test"]
    assert text.vocabulary % 8 == 0
    ids = text.windows["train"][:, :-1].reshape(-1)
    assert 0 < ids.max() < text.vocabulary
    if unit == "character":
        characters = ["?", *json.loads(text.tokenizer)["characters"]]
        assert TEXT.startswith("".join(characters[i] for i in ids[:3000]))
        assert " test characters a token, 0.0" in text.note
    else:
        pieces = tokenizers.Tokenizer.from_str(text.tokenizer)
        assert pieces.token_to_id("[CLS]") not in ids
        read = pieces.decode(ids[:1000].tolist(), skip_special_tokens=False)
        assert TEXT.startswith(read.replace(" [SEP] ", "\n").rstrip())
        assert text.note.count("%") == 1


def test_vocabulary_is_of_the_training_split(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT + "\u00e9" * 30 + "\n", encoding="utf-8")
    text = language_data.read(make_config(tmp_path))
    assert ", 0.00% unknown" not in text.note
    assert (text.windows["test"] == 0).any() and not (text.windows["train"] == 0).any()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"caf\xe9 au lait\n", "a.txt: .*can't decode byte 0xe9 in position 3"),
        (b"", "Too little text"),
        (b"short\n", "Too little text: a window has 17 tokens"),
        (None, "No file a.txt"),
    ],
    ids=["not UTF-8", "empty", "short", "none"],
)
def test_unusable_text_is_one_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    config = make_config(tmp_path, data__text_files="a.txt")
    with helpers.one_line(tfamp.DataError, message):
        language_data.read(config)


@pytest.mark.parametrize(("field", "value"), [("unit", "word"), ("name", "wikitext")])
def test_unknown_settings_are_refused(field, value):
    with pytest.raises(ValueError, match=f"config.data.{field} must.*{value}"):
        language_data.read(make_config(**{f"data__{field}": value}))


def test_docstrings_of_a_file_are_in_one_split(tmp_path, monkeypatch):
    (tmp_path / "lorem").mkdir()
    (tmp_path / "lorem/__init__.py").write_text("")
    for index in range(20):
        word = chr(ord("a") + index) * 4
        code = "".join(
            f'def f{mark}():\n    """{f"{word}{mark} " * 9}"""\n' for mark in "yz"
        )
        (tmp_path / f"lorem/m{index}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    fields = {
        **{"data__libraries": ("lorem",), "data__unit": "character"},
        **{"data__sequence_length": 1, "data__test_fraction": 0.2},
    }
    config = helpers.configured(
        language_model, "docstrings", validation_fraction=0.2, **fields
    )
    text = language_data.read(config)
    sys.modules.pop("lorem", None)
    assert "40 docstrings of lorem; " in text.note
    names = ["", *json.loads(text.tokenizer)["characters"]]
    words = [
        {names[i] for i in part.reshape(-1)} - {*" yz\n"}
        for part in text.windows.values()
    ]
    assert list(text.windows) == ["train", "validation", "test"]
    assert words[0].isdisjoint(words[1] | words[2]) and len(words[0]) == 12


# ---- The model ----


@pytest.mark.parametrize("mode", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("float32_head", [False, True])
def test_loss_is_in_float32_and_the_head_as_asked(mode, float32_head):
    config = make_config(model__units=(8, 8), model__float32_head=float32_head)
    with policy.policy_scope(mode):
        model = modeling.build_model(config, 40)
    dtype = mode.removeprefix("mixed_")
    assert model.output.dtype == "float32" and model.output.shape == (None, 16, 40)
    head = "float32" if float32_head else dtype
    assert model.get_layer("logits").compute_dtype == head
    for name in ("embedding", "lstm1", "lstm2"):
        assert model.get_layer(name).compute_dtype == dtype
    assert {weight.dtype for weight in model.trainable_weights} == {"float32"}


def test_synthetic_batches_fit_the_model():
    made = tasks.synthetic(make_config())
    assert made.unit == "sequences"
    features, labels = next(iter(made.batches))
    assert features.shape == labels.shape == (32, 16)
    np.testing.assert_array_equal(features[:, 1:], labels[:, :-1])
    with policy.policy_scope("mixed_float16"):
        logits = made.build_model()(features)
        (perplexity,) = made.metrics()
    loss = float(made.loss(labels, logits))
    assert loss == pytest.approx(math.log(200), rel=0.01)  # It knows nothing yet.
    for half in (slice(0, 8), slice(8, 32)):
        perplexity.update_state(labels[half], logits[half])
    assert float(perplexity.result()) == pytest.approx(math.exp(loss), rel=1e-4)


@pytest.mark.issue("keras#15140")
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
    fields = {"precision__overrides": LOW_LOGITS, "compare_unscaled": True}
    config = make_config(data_dir, "mixed_float16", **fields)
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
    stored = json.loads((folder / "mixed_float16/seed0/precision.json").read_text())
    assert stored["loss_scale"] == 2.0**15
    text = (folder / "mixed_float16/seed0/precision.md").read_text()
    assert re.search(r"^\| logits +\| float16 \|", text, flags=re.M)
    rows = {row["path"]: row for row in stored["rows"]}
    assert {"embedding", "lstm1", "logits"} <= rows.keys()
    assert rows["logits"]["gradients"]["values"] == 32 * 16 * 32


def test_scale_that_is_too_small_loses_the_gradients(data_dir, tmp_path, monkeypatch):
    fields = {
        **{"precision__overrides": LOW_LOGITS, "epochs": 1, "limit_examples": 32},
        "precision__loss_scale__dynamic": False,
        "precision__loss_scale__initial_scale": 2.0**-14,
    }
    config = make_config(data_dir, "mixed_float16", **fields)
    kept = train_and_evaluate(config, tmp_path).scores["kept_gradients"]
    assert kept is not None and kept < 0.2
    # A quarter of the batch stands for the whole where memory is short.
    monkeypatch.setattr(modeling, "_ELEMENTS", 8 * 16 * 32)
    part = trained.evaluate(config, tmp_path)["scores"]
    assert part["kept_gradients"] == pytest.approx(kept, abs=0.02)


def test_diverged_run_ends_with_a_result_that_says_so(data_dir, tmp_path):
    fields = {"optimizer__learning_rate": 1e38, "optimizer__clip_global_norm": 0.0}
    config = make_config(data_dir, epochs=1, limit_examples=64, **fields)
    result = train_and_evaluate(config, tmp_path)
    assert result.scores == {"perplexity": None, "kept_gradients": None}
    assert result.test_loss is None


@pytest.mark.skipif(
    not hardware.format_support("bfloat16", hardware.read_devices()).fast,
    reason="the bfloat16 rewrite needs a CPU with native bfloat16",
)
def test_graph_rewrite_converts_the_products(data_dir, tmp_path):
    fields = {"epochs": 1, "limit_examples": 32, "precision__graph_rewrite": True}
    config = make_config(data_dir, "mixed_bfloat16", **fields)
    result = train_and_evaluate(config, tmp_path)
    assert "effective: bfloat16" in result.graph_rewrite
    stored = json.loads((tmp_path / "precision.json").read_text())
    assert stored["mode"] == "mixed_bfloat16"  # Though every layer says float32.
