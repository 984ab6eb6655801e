import socket

import numpy as np
import pytest

from tfamp import errors
from tfamp.training import bert_config, squad, squad_splits

ROWS = (
    "textID,text,selected_text,sentiment\n"
    '1," so good, good",good,positive\n'
    "2,very sad,sad,negative\n"
    "3,the day,the day,neutral\n"
    "4,nice one,nice,positive\n"
)


def article(title, count, context="{title} {number}"):
    """Returns questions on one article, each on a context of its own."""
    questions = []
    for number in range(count):
        text = context.format(title=title, number=number)
        answers = (squad.Answer(text, 0),)
        name = f"{title}{number}"
        questions.append(squad.Question(name, title, text, "what?", answers))
    return questions


ARTICLES = [q for title in "abcdefgh" for q in article(title, 5)]


def csv_config(**changes):
    config = bert_config.get_span_csv_config()
    config.data.update(changes)
    config.validation_fraction = 0.25
    config.data.test_fraction = 0.25
    return config


def titles(questions):
    return {question.title for question in questions}


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.01, 5), (0.2, 5), (0.5, 20), (0.99, 35)]
)
def test_articles_are_held_out_whole(fraction, expected):
    kept, held = squad_splits.hold_out(ARTICLES, fraction, seed=0)
    assert sorted(kept + held) == sorted(ARTICLES)
    assert titles(kept) and titles(held) and not titles(kept) & titles(held)
    # No more than the share, but one of the eight articles of five questions.
    assert len(held) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"), [((60, 10, 10, 10, 10), 10), ((99, 1), 1), ((70, 30), 30)]
)
def test_held_out_share_is_of_questions_not_of_articles(sizes, expected):
    parts = zip("abcde", sizes, strict=False)
    questions = [q for title, size in parts for q in article(title, size)]
    for seed in range(5):
        _, held = squad_splits.hold_out(questions, 0.1, seed)
        assert len(held) == expected


def test_split_depends_on_the_seed_and_not_on_the_order():
    first = squad_splits.hold_out(ARTICLES, 0.3, seed=0)
    assert squad_splits.hold_out(ARTICLES[::-1], 0.3, seed=0) == first
    others = [squad_splits.hold_out(ARTICLES, 0.3, seed=seed)[1] for seed in (1, 2, 3)]
    assert any(titles(other) != titles(first[1]) for other in others)


def test_without_titles_equal_contexts_stay_together():
    questions = [
        question._replace(id=f"{question.id}-{i}", title="", context=context)
        for question in article("t", 4)
        for i, context in enumerate((question.context, f" {question.context.upper()}"))
    ]
    kept, held = squad_splits.hold_out(questions, 0.5, seed=0)
    assert len(kept) == len(held) == 4
    numbers = [{q.id.split("-")[0] for q in part} for part in (kept, held)]
    assert not numbers[0] & numbers[1]


def test_what_cannot_be_split_is_an_error():
    with pytest.raises(errors.DataError, match=r"3 question\(s\) on 1 article"):
        squad_splits.hold_out(article("a", 3), 0.5, seed=0)
    with pytest.raises(ValueError, match=r"\(0, 1\). Received: 1.5"):
        squad_splits.hold_out(ARTICLES, 1.5, seed=0)


def test_csv_spans_get_their_place_and_their_row(tmp_path):
    (tmp_path / "train.csv").write_text(ROWS)
    splits = squad_splits.load(csv_config(), str(tmp_path), None)
    assert [len(part) for part in splits[:3]] == [2, 1, 1]
    assert splits.notes == ()
    questions = {q.id: q for part in splits[:3] for q in part}
    assert questions["train.csv:2"] == squad.Question(
        "train.csv:2", "", "so good, good", "positive", (squad.Answer("good", 3),)
    )
    assert set(questions) == {f"train.csv:{row}" for row in (2, 3, 4, 5)}


def test_test_file_is_used_whole_and_shared_contexts_are_noted(tmp_path):
    (tmp_path / "train.csv").write_text(ROWS)
    (tmp_path / "test.csv").write_text(ROWS.split("2,very")[0] + "9,other,other,x\n")
    config = csv_config(test_file="test.csv")
    for fraction, sizes in ((0.0, [4, 0, 2]), (0.74, [1, 3, 2])):
        config.validation_fraction = fraction
        splits = squad_splits.load(config, str(tmp_path), None)
        assert [len(part) for part in splits[:3]] == sizes
        assert splits.notes == ("1 context(s) are in both training and test data",)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            "5,fine day,night,neutral",
            "row 6: selected_text 'night' is not in text 'fin",
        ),
        ("5,fine day,Fine,neutral", "row 6: selected_text 'Fine' is not in text"),
        ("5,fine day,,neutral", "row 6: column 'selected_text' is empty"),
        ("5,fine day,fine", r"row 6: 3 field\(s\), expected 4"),
    ],
    ids=["not in the text", "other case", "no span", "too few fields"],
)
def test_bad_rows_are_errors_or_skipped_and_counted(tmp_path, row, expected):
    (tmp_path / "train.csv").write_text(f"{ROWS}{row}\n")
    with pytest.raises(errors.DataError, match=expected):
        squad_splits.load(csv_config(), str(tmp_path), None)
    splits = squad_splits.load(csv_config(on_bad_rows="skip"), str(tmp_path), None)
    assert sum(len(part) for part in splits[:3]) == 4
    assert splits.notes == ("1 bad question(s) skipped",)


def test_missing_column_is_an_error(tmp_path):
    (tmp_path / "train.csv").write_text("text,sentiment\na,neutral\n")
    expected = "row 1: no column 'selected_text'.*, or set .*config.data.answer_column"
    with pytest.raises(errors.DataError, match=expected) as caught:
        squad_splits.load(csv_config(), str(tmp_path), None)
    assert "data.text_column" not in str(caught.value)


def test_limit_and_order_depend_on_the_split_seed(tmp_path):
    rows = "".join(f"{i},word {i},word,neutral\n" for i in range(40))
    (tmp_path / "train.csv").write_text("textID,text,selected_text,sentiment\n" + rows)

    def ids(**changes):
        config = csv_config(**changes)
        config.limit_examples = 3
        splits = squad_splits.load(config, str(tmp_path), None)
        assert [len(part) for part in splits[:3]] == [3, 3, 3]
        return [[question.id for question in part] for part in splits[:3]]

    assert ids() == ids() != ids(split_seed=1)


# ---- TFDS ----


@pytest.fixture(scope="module")
def write_tfds(tmp_path_factory):
    """Returns a function: {split: questions} -> folder with TFDS' squad of them."""
    tfds = pytest.importorskip("tensorflow_datasets")

    def write(parts):
        folder = str(tmp_path_factory.mktemp("tfds"))
        tfds.disable_progress_bar()
        tfds.dataset_builders.store_as_tfds_dataset(
            name="squad",
            config="v1.1",
            version="3.0.0",
            features=tfds.builder("squad", data_dir=folder).info.features,
            data_dir=folder,
            split_datasets={
                split: [(q.id, squad.example(q)) for q in questions]
                for split, questions in parts.items()
            },
        )
        return folder

    return write


def test_tfds_squad_is_read_as_it_was_written(write_tfds):
    parts = {"train": ARTICLES, "validation": article("z\u00e9", 3)}
    folder = write_tfds(parts)
    config = bert_config.get_squad_config()
    config.validation_fraction = 0.25
    splits = squad_splits.load(config, folder, None)
    assert [len(part) for part in splits[:3]] == [30, 10, 3]
    assert sorted(splits.train + splits.validation) == sorted(ARTICLES)
    assert sorted(splits.test) == parts["validation"]
    assert not titles(splits.train) & titles(splits.validation)


def test_bad_question_of_tfds_names_split_and_id(write_tfds):
    wrong = article("w", 1)[0]._replace(answers=(squad.Answer("w", 1),))
    folder = write_tfds({"train": ARTICLES, "validation": [wrong]})
    config = bert_config.get_squad_config()
    with pytest.raises(errors.DataError, match=r"squad \(validation\), question 'w0'"):
        squad_splits.load(config, folder, None)
    config.data.on_bad_rows = "skip"
    with pytest.raises(errors.DataError, match="40 usable training and 0 test"):
        squad_splits.load(config, folder, None)


def test_tfds_data_without_answers_are_refused(write_tfds):
    folder = write_tfds({"train": ARTICLES})
    config = bert_config.get_squad_config()
    with pytest.raises(errors.DataError, match="Received: splits train, features ans"):
        squad_splits.load(config, folder, None)


@pytest.mark.parametrize("wrong", ["id", "starts", "text", "bytes"])
def test_tfds_data_of_other_kinds_are_a_line(tmp_path, wrong):
    tfds = pytest.importorskip("tensorflow_datasets")
    answers = {"text": tfds.features.Text(), "answer_start": np.int32}
    features = dict.fromkeys(("id", "context", "question"), tfds.features.Text())
    features["answers"] = tfds.features.Sequence(answers)
    example = {"id": "1", "context": "a b", "question": "?"}
    example["answers"] = {"text": ["a"], "answer_start": [0]}
    if wrong == "id":
        features["id"], example["id"] = np.int32, 1
    elif wrong == "starts":
        features["answers"] = tfds.features.Sequence({"text": tfds.features.Text()})
        example["answers"] = {"text": ["a"]}
    elif wrong == "text":
        features["answers"], example["answers"] = tfds.features.Text(), "a"
    else:
        example["question"] = b"caf\xe9"
    tfds.dataset_builders.store_as_tfds_dataset(
        name="mine",
        version="1.0.0",
        features=tfds.features.FeaturesDict(features),
        data_dir=tmp_path,
        split_datasets=dict.fromkeys(("train", "validation"), [(0, example)]),
    )
    config = bert_config.get_squad_config()
    config.data.name = "mine"
    expected = {
        "id": "Received: id: .*int32",
        "bytes": r"mine \(train\), row 1: 'utf-8",
    }
    with pytest.raises(
        errors.DataError, match=expected.get(wrong, "Received: answers: ")
    ) as caught:
        squad_splits.load(config, str(tmp_path), None)
    assert "\n" not in str(caught.value)


def test_unprepared_squad_without_a_network_is_refused(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no network")

    pytest.importorskip("tensorflow_datasets")
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    config = bert_config.get_squad_config()
    with pytest.raises(errors.DataError, match="'squad' is not prepared.*--data_dir"):
        squad_splits.load(config, str(tmp_path), None)
