import json
import re

import helpers
import numpy as np
import pandas
import pytest
import tensorflow as tf

import tfamp
from tfamp.measuring import workloads
from tfamp.recipes import text_classification
from tfamp.runs import base_config, tasks, trained
from tfamp.training import train_and_evaluate

pytest.importorskip("keras_hub")

WORDS = "good fine nice bad poor sad movie food phone is was very".split()


def load_config(name):
    """Returns a configuration of `configs/bert`."""
    return workloads.load(helpers.ROOT / f"configs/bert/{name}.py")


def small_config(folder, **fields):
    given = {
        **{"data__sequence_length": 16, "validation_fraction": 0.25},
        **{"limit_examples": 0, "data_dir": str(folder)},
    }
    config = base_config.apply_tiny(load_config("csv"))
    return helpers.with_fields(config, **{**given, **fields})


def create(folder, **fields):
    return tasks.from_config(small_config(folder, **fields))


@pytest.fixture
def folder(tmp_path):
    """A CSV file of sentences that say by one word which class they are of."""
    rng = np.random.default_rng(0)
    rows = ["text,label"]
    for number in range(80):
        word = WORDS[rng.integers(3) + 3 * (number % 2)]
        text = " ".join(rng.permutation([*WORDS[6:], word]))
        rows.append(f"the {text} {number},{('up', 'down')[number % 2]}")
    (tmp_path / "train.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


def batch_of(task, size=8):
    return next(iter(task.train.batch(size)))


def classify(*arguments):
    """What docs/export.md shows: neither tfamp nor Keras is needed."""
    text = (helpers.ROOT / "docs" / "export.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    (code,) = [block for block in blocks if "def classify" in block]
    names = {}
    exec(code, names)
    return names["classify"](*arguments)


def test_run_on_an_own_file_serves_text(folder):
    fields = {"optimizer__learning_rate": 1e-2, "precision__mode": "mixed_bfloat16"}
    config, run = small_config(folder, epochs=15, **fields), folder / "run"
    result = train_and_evaluate(config, run)
    assert 0.5 <= result.chance < 0.8 and not result.at_chance
    environment = json.loads((run / "environment.json").read_text())
    assert environment["embedding_layers"] > 0
    rows = json.loads((run / "predictions.json").read_text())
    assert result.score == result.scores["accuracy"] > 0.8
    assert np.mean([row["label"] == row["prediction"] for row in rows]) == result.score
    assert all(0.5 <= row["probability"] <= 1.0 for row in rows)
    trained.export(config, run, "float32", folder / "export")
    served = classify([row["text"] for row in rows], folder / "export")
    agree = np.mean(
        [s == row["prediction"] for s, row in zip(served, rows, strict=True)]
    )
    assert agree >= 0.9  # Of bfloat16 and float32: near a tie they may differ.
    assert len(classify(["good", "very " * 40], folder / "export")) == 2
    # New rows, of the file's own column, are answered as those of the test split are.
    pandas.DataFrame({"text": [row["text"] for row in rows]}).to_json(
        folder / "new.jsonl", orient="records", lines=True
    )
    asked = folder / "new.jsonl", folder / "answers.csv"
    assert trained.predict(config, run, *asked) == (16, "best.weights.h5")
    answers = pandas.read_csv(folder / "answers.csv")
    assert answers.prediction.tolist() == [row["prediction"] for row in rows]
    assert answers.probability.tolist() == pytest.approx(
        [row["probability"] for row in rows], abs=2e-3
    )
    (folder / "new.csv").write_text("words\ngood\n")
    for file, error, words in (
        (folder / "new.csv", tfamp.DataError, "no column 'text'. Found: 'words'"),
        ("new.xls", ValueError, r"end in .csv.*'.*new.xls'"),
    ):
        with pytest.raises(error, match=words):
            trained.predict(config, run, file, folder / "answers.csv")


def test_datasets_have_fixed_order_dtypes_and_cardinality(folder):
    task, again = (create(folder) for _ in range(2))
    assert [len(part) for part in (task.train, task.validation, task.test)] == [
        *(48, 16, 16)
    ]
    features, label = task.train.element_spec
    assert set(features) == {"token_ids", "segment_ids", "padding_mask"}
    for spec in features.values():
        assert (spec.shape, spec.dtype) == ((16,), tf.int32)
    assert (label.shape, label.dtype) == ((), tf.int32)
    tf.nest.map_structure(
        np.testing.assert_array_equal, batch_of(task, 48), batch_of(again, 48)
    )
    assert "48 train / 16 validation / 16 test" in task.description
    assert "0 of 80 texts cut to 16 tokens, padded to 16 tokens" in task.description


def test_cut_texts_are_counted_and_pairs_keep_their_segments(tmp_path):
    firsts = [f"{WORDS[n % 12]} {WORDS[n // 12]}" for n in range(40)]
    rows = "".join(f"{first},bad movie is,{n % 2}\n" for n, first in enumerate(firsts))
    (tmp_path / "train.csv").write_text("text,other,label\n" + rows)
    task = create(tmp_path, data__second_text_column="other")
    features, _ = batch_of(task)
    segments, mask = features["segment_ids"].numpy(), features["padding_mask"].numpy()
    assert segments.sum(axis=1).tolist() == [4] * 8  # bad movie is [SEP]
    assert (segments <= mask).all() and (segments[:, :4] == 0).all()
    cut = create(tmp_path, data__second_text_column="other", data__sequence_length=6)
    assert "40 of 40 texts cut to 6 tokens, padded to 6 tokens" in cut.description


@pytest.mark.parametrize("mode", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_head_is_float32_and_padding_changes_nothing(folder, mode, pooling):
    task = create(folder, model__pooling=pooling)
    with tfamp.policy_scope(mode):
        model = task.build_model()
    compute = mode.removeprefix("mixed_")
    assert model.get_layer("transformer_layer_0").compute_dtype == compute
    assert {v.dtype for v in model.trainable_variables} == {"float32"}
    features, labels = batch_of(task)
    logits = model(features)
    assert (logits.dtype, logits.shape) == (tf.float32, (8, 2))
    # Not numbers of 16 bits that were cast.
    assert np.any(np.asarray(logits) != tf.cast(tf.cast(logits, "bfloat16"), "float32"))
    assert np.isfinite(task.loss(labels, logits))
    padded = {k: np.pad(v, ((0, 0), (0, 8))) for k, v in features.items()}
    # Sums in another order: a few roundings of values near 1.
    atol = 16 * tfamp.float_format(compute).epsilon
    np.testing.assert_allclose(logits, model(padded), rtol=0, atol=atol)


@pytest.mark.parametrize("name", ["glue/cola", "csv"])
def test_scores_are_those_of_glue(folder, name):
    metrics = pytest.importorskip("sklearn.metrics")
    if name == "glue/cola":
        rows = [
            row.split(",") for row in (folder / "train.csv").read_text().split("\n")
        ]
        lines = [f"x\t{row[1] == 'up':d}\t\t{row[0]}\n" for row in rows[1:-1]]
        for file, part in (("train.tsv", lines[:60]), ("dev.tsv", lines[60:])):
            (folder / file).write_text("".join(part))
    task = create(folder, data__name=name, manual_dir=str(folder))
    model = task.build_model()
    logits = model.predict(task.test.batch(20), verbose=0)
    middle = np.median(logits[:, 1] - logits[:, 0])
    model.get_layer("logits").bias.assign([middle, 0.0])  # Each class is predicted.
    scores = task.score(model, folder)
    rows = json.loads((folder / "predictions.json").read_text())
    labels, predicted = ([row[k] for row in rows] for k in ("label", "prediction"))
    second = json.loads(task.assets["labels.json"])[1]
    expected = {
        "accuracy": metrics.accuracy_score(labels, predicted),
        "f1": metrics.f1_score(labels, predicted, pos_label=second),
    }
    if name == "glue/cola":
        expected = {"mcc": metrics.matthews_corrcoef(labels, predicted), **expected}
    assert list(scores) == list(expected) and scores == pytest.approx(expected)
    largest = max(labels.count(label) for label in labels) / len(labels)
    assert task.chance == (0 if name == "glue/cola" else pytest.approx(largest))
    assert len(set(predicted)) == 2


def test_synthetic_batches_are_full_and_need_no_data():
    sizes = {"batch_size": 4, "data__sequence_length": 96}  # New positions: 64.
    config = helpers.with_fields(load_config("docstrings"), **sizes)
    made, again = (text_classification.synthetic(config) for _ in range(2))
    features, labels = next(iter(made.batches))
    assert {v.shape for v in features.values()} == {(4, 96)} and labels.shape == (4,)
    assert features["padding_mask"].numpy().all()
    other, _ = next(iter(again.batches))
    np.testing.assert_array_equal(features["token_ids"], other["token_ids"])
    assert made.build_model()(features).shape == (4, 2)
    assert made.unit == "sequences" and "new, 2 layers of 128" in made.description


@pytest.mark.parametrize(
    ("name", "data", "size", "expected"),
    [
        ("sentences", "uci_sentences", 3000, "2 classes (0, 1)"),
        ("tweets", "tweets", 27480 + 3534, "3 classes (negative, neutral, positive)"),
    ],
)
def test_real_files_are_read_whole(shared_data, name, data, size, expected):
    folder = str(shared_data(data))
    task = tasks.from_config(helpers.with_fields(load_config(name), data_dir=folder))
    assert sum(map(len, (task.train, task.validation, task.test))) == size
    assert expected in task.description and "bad row" not in task.description
