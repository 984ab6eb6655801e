import json

import numpy as np
import pytest

from tfamp.training import class_scores, text

metrics = pytest.importorskip("sklearn.metrics")


@pytest.mark.parametrize(
    ("labels", "predicted", "expected"),
    [
        ([1, 0, 1, 0], [1, 0, 1, 0], 1.0),
        ([1, 1, 0, 0], [1, 0, 1, 0], 0.5),
        ([1, 1, 1, 0, 0], [1, 1, 1, 1, 1], 0.75),
        ([1, 1], [0, 0], 0.0),
        ([0, 0], [0, 0], 0.0),
    ],
    ids=["all right", "half", "always the second class", "never", "none there"],
)
def test_f1_is_of_the_second_class(labels, predicted, expected):
    score = class_scores.f1(np.array(labels), np.array(predicted))
    assert score == expected
    reference = metrics.f1_score(labels, predicted, zero_division=0.0)
    assert score == pytest.approx(reference)


def corpus(second=None):
    test = [text.Example(f"t{n}", n % 3, second) for n in range(3)]
    return text.Corpus([], [], test, ("a", "b", "c"), ())


def test_predictions_name_texts_classes_and_probabilities(tmp_path):
    logits = np.array([[0, 0, 0], [1000, 0, 0], [0, np.log(2), np.log(2)]], "float32")
    class_scores.write_predictions(tmp_path / "p.json", logits, corpus("s"))
    rows = json.loads((tmp_path / "p.json").read_text())
    assert rows[1] == {
        "index": 1,
        "text": "t1",
        "second": "s",
        "label": "b",
        "prediction": "a",
        "probability": 1.0,
    }
    assert [row["prediction"] for row in rows] == ["a", "a", "b"]
    assert [row["probability"] for row in rows] == [0.333333, 1.0, 0.4]


def test_run_that_diverged_still_has_a_file(tmp_path):
    logits = np.array([[np.nan] * 3, [np.inf, 0, 0], [0, 0, 1]], "float32")
    class_scores.write_predictions(tmp_path / "p.json", logits, corpus())
    rows = json.loads((tmp_path / "p.json").read_text())
    assert [row["probability"] for row in rows][:2] == [None, None]
    assert rows[2]["prediction"] == "c" and "second" not in rows[0]
