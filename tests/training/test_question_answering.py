import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.precision import policy
from tfamp.training import (
    bert_config,
    question_answering,
    squad_scores,
    tasks,
    tokens,
    trainer,
)

pytest.importorskip("keras_hub")
pytest.importorskip("tokenizers")

LENGTH = 16
NAMES = "ann bob eve joe kim lee may pat ray sue tom zoe".split()
JOBS = "baker clerk judge nurse pilot tutor".split()


def make_config(**data):
    """Spans of a CSV file under a small new encoder; some contexts need two windows."""
    config = bert_config.get_span_csv_config()
    config.validation_fraction = 0.25
    config.epochs = 1
    config.batch_size = 8
    config.eval_batch_size = 16
    config.data.sequence_length = LENGTH
    config.data.doc_stride = 4
    config.data.max_query_length = 3
    config.data.max_answer_length = 4
    config.data.n_best_size = 4
    config.data.update(data)
    config.model.update(
        num_layers=1,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        max_sequence_length=LENGTH,
        vocabulary_size=200,
    )
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Who has which job: the answer is the name before the job that is asked for."""
    rng = np.random.default_rng(0)
    rows = ["text,sentiment,selected_text"]
    for number in range(32):
        names = rng.permutation(NAMES)[:2]
        jobs = rng.permutation(JOBS)[:2]
        tail = " and so it goes on" if number % 4 == 0 else ""
        context = f"{names[0]} is {jobs[0]}. {names[1]} is {jobs[1]}{tail}."
        asked = number % 2
        rows.append(f"{context},who {jobs[asked]},{names[asked]}")
    path = tmp_path_factory.mktemp("spans")
    (path / "train.csv").write_text("\n".join(rows) + "\n")
    return str(path)


def create(config, folder):
    config = config.copy_and_resolve_references()
    config.data_dir = folder
    return tasks.from_config(config)


@pytest.fixture(scope="module")
def task(folder):
    return create(make_config(), folder)


def batch_of(task, size=8):
    return next(iter(task.train.batch(size)))


def test_task_has_windows_positions_and_a_description(task, folder):
    features, label = task.train.element_spec
    assert set(features) == {"token_ids", "segment_ids", "padding_mask"}
    assert all(f.shape[0] % 8 == 0 and f.dtype == tf.int32 for f in features.values())
    assert (label.shape, label.dtype) == ((2,), tf.int32)
    assert len(task.train) > 20
    for words in (
        "20 train / 6 validation / 6 test questions",
        f"windows of up to {LENGTH} tokens, at most 4 apart",
        "0 of 32 questions cut to 3 tokens",
        "training windows without the whole answer",
        "validation windows without it, which position accuracy counts",
        "encoder: new, 1 layers of 16",
    ):
        assert words in task.description
    again = create(make_config(), folder)
    tf.nest.map_structure(
        np.testing.assert_array_equal, batch_of(task, 99), batch_of(again, 99)
    )


def test_share_of_zero_selects_nothing_and_is_the_default(folder):
    config = make_config()
    config.validation_fraction = bert_config.get_squad_config().validation_fraction
    task = create(config, folder)
    assert task.validation is None
    assert "position accuracy" not in task.description
    assert "26 train / 0 validation / 6 test questions" in task.description


def test_tokens_are_kept_where_the_setting_says(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "FEWEST_CACHED", 10)
    create(make_config(token_cache=str(tmp_path)), folder)
    assert {path.suffix for path in tmp_path.iterdir()} == {".npz"}


def test_configuration_has_no_settings_of_other_tasks():
    config = bert_config.get_span_csv_config()
    settings = {*config.data, *config.model}
    assert not settings & {"text_column", "label_column", "pooling"}
    assert "question_column" in settings


@pytest.mark.parametrize("mode", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_logits_are_float32_rows_of_starts_and_ends_in_every_mode(task, mode):
    with policy.policy_scope(mode) as chosen:
        model = task.build_model()
    compute = keras.dtype_policies.get(chosen.policy).compute_dtype
    assert model.get_layer("transformer_layer_0").compute_dtype == compute
    features, labels = batch_of(task)
    logits = model(features)
    assert logits.dtype == tf.float32
    assert logits.shape == (8, 2, features["token_ids"].shape[1])
    assert np.isfinite(task.loss(labels, logits))
    assert [metric.name for metric in task.metrics()] == ["position_accuracy"]


def test_loss_is_the_mean_of_both_cross_entropies(task):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 2, 5))
    labels = np.array([[0, 1], [2, 2], [4, 0]], "int32")
    chances = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
    start, end = (
        -np.log(chances[np.arange(3), row, labels[:, row]]).mean() for row in (0, 1)
    )
    loss = float(task.loss(labels, logits.astype("float32")))
    rel = 16 * float(np.finfo("float32").eps)
    assert loss == pytest.approx((start + end) / 2, rel=rel)


def test_small_model_learns_to_answer(folder, tmp_path):
    config = make_config()
    config.model.dropout = 0.0
    task = create(config, folder)
    model = task.build_model()
    model.compile(keras.optimizers.Adam(1e-2), task.loss, metrics=task.metrics())
    untrained = task.score(model, tmp_path)
    everything = task.train.concatenate(task.validation).concatenate(task.test)
    model.fit(everything.batch(64).cache(), epochs=150, shuffle=False, verbose=0)
    scores = task.score(model, tmp_path)
    assert list(scores) == ["jaccard", "f1", "exact_match"]
    assert untrained["f1"] < 0.8
    assert scores == {"jaccard": 1.0, "f1": 1.0, "exact_match": 1.0}


def test_run_writes_predictions_that_score_what_it_says(folder, tmp_path):
    config = make_config()
    config.data_dir = folder
    config.precision.mode = "mixed_bfloat16"
    result = trainer.train_and_evaluate(config, tmp_path)
    assert result.score_name == "jaccard"
    assert set(result.scores) == {"jaccard", "f1", "exact_match", "position_accuracy"}
    best = json.loads((tmp_path / "predictions.json").read_text())
    nbest = json.loads((tmp_path / "nbest_predictions.json").read_text())
    assert len(best) == 6
    with open(f"{folder}/train.csv") as file:
        rows = file.read().split("\n")
    gold = {name: rows[int(name.split(":")[1]) - 1].split(",")[2] for name in best}
    f1 = np.mean([squad_scores.f1(best[name], gold[name]) for name in best])
    assert result.scores["f1"] == pytest.approx(f1)
    assert {name: spans[0]["text"] for name, spans in nbest.items()} == best
    for spans in nbest.values():
        chances = [span["probability"] for span in spans]
        assert 1 <= len(chances) <= 4 and chances == sorted(chances, reverse=True)
        assert sum(chances) == pytest.approx(1)


def test_model_exports_in_float32(task, tmp_path):
    with policy.policy_scope("mixed_bfloat16"):
        model = task.build_model()
    tfamp.export_float32(model, tmp_path / "export")
    served = tf.saved_model.load(str(tmp_path / "export"))
    features, _ = batch_of(task, 2)
    logits = served.serve(features)
    single = tfamp.set_precision(model, "float32")(features)
    # Sums of 16 products of values near 1, in another order.
    atol = 64 * np.finfo("float32").eps
    np.testing.assert_allclose(logits, single, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"doc_stride": 0}, "doc_stride` must be >= 1"),
        ({"max_query_length": 13}, "below sequence_length - 3"),
        ({"n_best_size": 0}, "n_best_size` must be >= 1"),
        ({"max_answer_length": 0}, "max_answer_length` must be >= 1"),
        ({"sequence_length": 24}, "Received: 24, positions: 16"),
        ({"on_bad_rows": "drop"}, "'raise' or 'skip'. Received: 'drop'"),
    ],
    ids=["stride", "question", "n-best", "answer", "positions", "bad rows"],
)
def test_settings_that_make_no_sense_are_refused(folder, changes, expected):
    with pytest.raises(ValueError, match=expected):
        question_answering.create(make_config(**changes), folder)


def test_tokenizer_knows_the_training_split_only(folder, monkeypatch):
    seen = []
    train = question_answering.tokens.train

    def spy(texts, size):
        seen.append((list(texts), size))
        return train(texts, size)

    monkeypatch.setattr(question_answering.tokens, "train", spy)
    create(make_config(), folder)
    ((texts, size),) = seen
    assert (len(texts), size) == (2 * 20, 200)
