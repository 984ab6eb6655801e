import copy
import json

import pytest

from tfamp import errors
from tfamp.training import squad

CONTEXT = "The tower is 300 m high."
ENTRY = {
    "id": "q1",
    "question": "How high is it?",
    "answers": [{"text": "300 m", "answer_start": 13}],
}
FILE = {
    "data": [
        {"title": "Tower", "paragraphs": [{"context": CONTEXT, "qas": [ENTRY]}]},
        {"paragraphs": [{"context": "b a", "qas": [{**ENTRY, "id": "q2"}]}]},
    ],
    "version": "1.1",
}
FILE["data"][1]["paragraphs"][0]["qas"][0]["answers"] = [
    {"text": "a", "answer_start": 2},
    {"text": "b a", "answer_start": 0},
]


def write(folder, content):
    file = folder / "questions.json"
    text = content if isinstance(content, str) else json.dumps(content)
    file.write_text(text, encoding="utf-8")
    return file


def changed(**fields):
    """Returns the file with its first question changed; None removes a field."""
    content = copy.deepcopy(FILE)
    entry = content["data"][0]["paragraphs"][0]["qas"][0]
    for name, value in fields.items():
        if value is None:
            del entry[name]
        else:
            entry[name] = value
    return content


def answer(text, start):
    return [{"text": text, "answer_start": start}]


def test_questions_are_read_in_the_order_of_the_file(tmp_path):
    first, second = squad.read_json(write(tmp_path, FILE))
    assert first == squad.Question(
        "q1", "Tower", CONTEXT, "How high is it?", (squad.Answer("300 m", 13),)
    )
    assert (second.id, second.title) == ("q2", "")
    assert second.answers == (squad.Answer("a", 2), squad.Answer("b a", 0))


def test_title_that_is_no_string_is_none(tmp_path):
    content = copy.deepcopy(FILE)
    content["data"][0]["title"] = None
    assert squad.read_json(write(tmp_path, content))[0].title == ""


def test_offsets_count_characters_and_a_byte_order_mark_does_not(tmp_path):
    content = changed(answers=answer("300 m", 15))
    content["data"][0]["paragraphs"][0]["context"] = "\u00e9\U0001f600" + CONTEXT
    text = "\ufeff" + json.dumps(content, ensure_ascii=False)
    assert squad.read_json(write(tmp_path, text))[0].answers[0].start == 15


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is empty"),
        ('{"data": [', "is not valid JSON"),
        ("[]", "'data' is missing or not of type list"),
        ({"version": "1.1"}, "'data' is missing"),
        ({"data": []}, "has no usable question"),
        ({"data": [{"title": "a"}]}, "article 1: 'paragraphs' is missing"),
        (
            {"data": [{"paragraphs": [{"qas": []}]}]},
            "article 1, paragraph 1: 'context' is missing",
        ),
        (
            {"data": [{"paragraphs": [{"context": "a"}]}]},
            "article 1, paragraph 1: 'qas' is missing",
        ),
        (changed(id=None), "article 1, paragraph 1, question 1: 'id' is missing"),
        (changed(question=None), r"question 1 \('q1'\): 'question' is missing"),
        (changed(question=3), "'question' is missing or not of type str"),
        (changed(answers=None), "'answers' is missing"),
        (changed(answers=answer("300 m", "13")), "'answer_start' is missing or not"),
        (changed(answers=answer("300 m", True)), "'answer_start' is missing or not"),
        (changed(answers=[]), "question 'q1': it has no answer"),
        (
            changed(answers=answer("300 m", 12)),
            "question 'q1': the answer '300 m' is not at its answer_start 12; there "
            "is ' 300 '",
        ),
        (changed(answers=answer("300 m", -11)), "answer_start -11; there is ''"),
        (changed(answers=answer("high.", 99)), "answer_start 99; there is ''"),
        (changed(answers=answer(" ", 3)), "an answer is empty"),
        (changed(question=" "), "its question is empty"),
        (changed(id="q2"), "question 'q2': its id occurs twice"),
        (changed(question="w\ud800?"), "'q1': its question has half of a surrogate"),
        (changed(id="q\udfff"), r"'q\\udfff': its id has half of a surrogate"),
    ],
    ids=[
        "empty file",
        "cut off",
        "a list",
        "no data key",
        "no article",
        "no paragraphs",
        "no context",
        "no questions",
        "no id",
        "no question",
        "question is a number",
        "no answers",
        "start is a string",
        "start is a bool",
        "unanswerable",
        "wrong start",
        "negative start",
        "start beyond the end",
        "empty answer",
        "empty question",
        "id twice",
        "surrogate",
        "surrogate in the id",
    ],
)
def test_malformed_files_are_one_line_errors(tmp_path, content, expected):
    with pytest.raises(errors.DataError, match=expected) as caught:
        squad.read_json(write(tmp_path, content))
    message = str(caught.value)
    assert "questions.json" in message and "\n" not in message


def test_missing_file_is_an_error(tmp_path):
    with pytest.raises(errors.DataError, match="Cannot read .*absent.json"):
        squad.read_json(tmp_path / "absent.json")


def test_bad_questions_are_told_apart(tmp_path):
    file = write(tmp_path, changed(answers=answer("300 m", 0)))
    questions, problems = squad.parse_json(file)
    assert [question.id for question in questions] == ["q2"]
    (line,) = problems
    assert "'q1'" in line and "'The t'" in line


def test_error_lists_five_bad_questions_and_counts_the_rest(tmp_path):
    content = copy.deepcopy(FILE)
    entries = [{**ENTRY, "id": f"n{i}", "answers": []} for i in range(8)]
    content["data"][0]["paragraphs"][0]["qas"] += entries
    with pytest.raises(errors.DataError, match="8 bad question.*'n4'.*; and 3 more"):
        squad.read_json(write(tmp_path, content))


def test_settle_skips_only_if_told_so():
    squad.settle([], "raise")
    squad.settle(["file, question 'q': bad"], "skip")
    with pytest.raises(errors.DataError, match="file, question 'q': bad"):
        squad.settle(["file, question 'q': bad"], "raise")
    with pytest.raises(ValueError, match="'raise' or 'skip'. Received: 'drop'"):
        squad.settle([], "drop")


def test_example_has_the_features_of_tfds(tmp_path):
    _, question = squad.read_json(write(tmp_path, FILE))
    assert squad.example(question) == {
        "id": "q2",
        "title": "",
        "context": "b a",
        "question": "How high is it?",
        "answers": {"text": ["a", "b a"], "answer_start": [2, 0]},
    }


def test_real_questions_have_no_bad_one(shared_data):
    questions, problems = squad.parse_json(shared_data("xquad_en") / "xquad.en.json")
    assert (len(questions), problems) == (1190, [])
    assert len({question.title for question in questions}) == 48
