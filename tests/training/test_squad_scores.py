import json

import hypothesis
import pytest
from hypothesis import strategies as st

from tfamp import errors
from tfamp.training import squad, squad_scores

ANSWERS = st.text(alphabet=" abteh.,-'é", max_size=12)


def question(name, *answers):
    spans = tuple(squad.Answer(answer, 0) for answer in answers)
    return squad.Question(name, "", "context", "question?", spans)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The  Cat!", "cat"),
        ("an apple a day", "apple day"),
        ("a-theme (the)", "atheme"),
        ("U.S.A.", "usa"),
        ("“the end”", "“ end”"),
        ("Beyoncé's", "beyoncés"),
        ("\tnew\nline ", "new line"),
        ("the", ""),
    ],
    ids=[
        "case, article, spaces, punctuation",
        "inner article",
        "article next to what was punctuation",
        "abbreviation",
        "quotes that are not ASCII stay",
        "accent stays",
        "tabs and line ends",
        "only an article",
    ],
)
def test_normalize(answer, expected):
    assert squad_scores.normalize(answer) == expected


@pytest.mark.parametrize(
    ("prediction", "gold", "exact", "f1", "jaccard"),
    [
        ("Denver Broncos", "The Denver Broncos.", 1, 1, 1 / 4),
        ("Broncos", "Denver Broncos", 0, 2 / 3, 1 / 2),
        ("the big big cat", "big cat", 0, 4 / 5, 2 / 3),
        ("big big", "big cat big", 0, 4 / 5, 1 / 2),
        ("dog", "cat", 0, 0, 0),
        ("the", "a", 1, 0, 0),
        ("", "", 1, 0, 1),
        ("", "cat", 0, 0, 0),
        ("so sad!!", "sad", 0, 2 / 3, 0),
        ("GOOD", "good", 1, 1, 1),
    ],
    ids=[
        "article and punctuation",
        "one of two words",
        "a word twice in the prediction",
        "a word twice in both",
        "nothing in common",
        "only articles",
        "both empty",
        "empty prediction",
        "Jaccard keeps punctuation",
        "case",
    ],
)
def test_scores_of_one_answer(prediction, gold, exact, f1, jaccard):
    assert squad_scores.exact_match(prediction, gold) == exact
    assert squad_scores.f1(prediction, gold) == pytest.approx(f1)
    assert squad_scores.jaccard(prediction, gold) == pytest.approx(jaccard)


@pytest.mark.parametrize("name", squad_scores.METRICS)
@hypothesis.given(first=ANSWERS, second=ANSWERS)
def test_scores_are_symmetric_fractions(name, first, second):
    metric = squad_scores.METRICS[name]
    value = metric(first, second)
    assert 0 <= value <= 1
    assert value == pytest.approx(metric(second, first))


@hypothesis.given(first=ANSWERS, second=ANSWERS)
def test_normalizing_loses_nothing_that_scores(first, second):
    normal = squad_scores.normalize(first)
    assert squad_scores.exact_match(normal, second) == squad_scores.exact_match(
        first, second
    )
    if normal:
        assert squad_scores.f1(first, first) == 1
    if squad_scores.exact_match(first, second) and normal:
        assert squad_scores.f1(first, second) == 1


def test_best_answer_counts_and_a_missing_prediction_is_zero():
    questions = [
        question("q1", "Denver", "Denver Broncos"),
        question("q2", "1999"),
        question("q3", "gold"),
    ]
    predictions = {"q1": "the Denver Broncos", "q2": "in 1999", "other": "gold"}
    scores = squad_scores.score(questions, predictions, squad_scores.METRICS)
    assert list(scores) == ["f1", "exact_match", "jaccard"]
    # q1: 1, 1, 2/3; q2: 2/3, 0, 1/2; q3: nothing.
    assert scores["f1"] == pytest.approx((1 + 2 / 3) / 3)
    assert scores["exact_match"] == pytest.approx(1 / 3)
    assert scores["jaccard"] == pytest.approx((2 / 3 + 1 / 2) / 3)


def test_nothing_to_score_is_an_error():
    with pytest.raises(ValueError, match="0 questions"):
        squad_scores.score([], {})


@pytest.fixture
def questions_file(tmp_path):
    entries = [
        {"id": "q1", "question": "?", "answers": [{"text": "b", "answer_start": 2}]},
        {"id": "q2", "question": "?", "answers": [{"text": "a b", "answer_start": 0}]},
    ]
    paragraph = {"context": "a b c", "qas": entries}
    file = tmp_path / "questions.json"
    file.write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    return file


def test_file_of_predictions_is_scored_against_a_squad_file(tmp_path, questions_file):
    predictions = tmp_path / "predictions.json"
    predictions.write_text(json.dumps({"q1": "The B", "q2": "b c"}))
    scores = squad_scores.score_file(questions_file, predictions)
    assert scores["exact_match"] == 1 / 2
    assert scores["f1"] == pytest.approx((1 + 2 / 3) / 2)


def test_scoring_has_no_use_for_places_and_byte_order_marks(tmp_path, questions_file):
    content = questions_file.read_text().replace(
        '"answer_start": 2', '"answer_start": 1'
    )
    questions_file.write_text("\ufeff" + content, encoding="utf-8")
    predictions = tmp_path / "predictions.json"
    predictions.write_text("\ufeff" + json.dumps({"q1": "b"}), encoding="utf-8")
    scores = squad_scores.score_file(questions_file, predictions)
    assert scores == {"f1": 0.5, "exact_match": 0.5}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "Cannot read .*predictions.json"),
        ("{", "Cannot read .*predictions.json as JSON"),
        ("[1]", "must hold a JSON object"),
        ('{"q1": 3}', "must hold a JSON object"),
    ],
    ids=["no file", "not JSON", "a list", "a number for an answer"],
)
def test_malformed_predictions_are_errors(tmp_path, questions_file, content, expected):
    file = tmp_path / "predictions.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(errors.DataError, match=expected):
        squad_scores.score_file(questions_file, file)
