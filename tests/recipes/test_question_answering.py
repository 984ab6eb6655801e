"""Questions: read, cut to windows, answered and scored; whole runs."""

import itertools
import json
import pathlib

import helpers
import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from tfamp import errors
from tfamp.precision import policy
from tfamp.recipes import question_answering
from tfamp.recipes.tasks import question_answering as answering
from tfamp.recipes.texts import encoders, squad_data, squad_windows
from tfamp.runs import tasks, trained, trainer

tokenizers = pytest.importorskip("tokenizers")

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]


# ---- Reading and splitting ----


def squad_file(*articles):
    """Returns SQuAD's JSON of articles of one paragraph: (title, context, answers)."""
    data = []
    for number, (title, context, answers) in enumerate(articles):
        spans = [{"text": text, "answer_start": start} for text, start in answers]
        entry = {"id": f"q{number}", "question": "what?", "answers": spans}
        paragraph = {"context": context, "qas": [entry]}
        data.append({"title": title, "paragraphs": [paragraph]})
    return {"data": data, "version": "1.1"}


def load(folder="", source="squad", **fields):
    """Returns the splits of a folder, read with these fields; `__` for a dot."""
    given = {"data_dir": folder, **fields}
    return squad_data.load(helpers.configured(question_answering, source, **given))


def write_squad(folder, train, test=None):
    for name, content in (("train-v1.1", train), ("dev-v1.1", test)):
        if content is not None:
            text = json.dumps(content, ensure_ascii=False)
            (folder / f"{name}.json").write_text("\ufeff" + text, encoding="utf-8")
    return str(folder)


# An accent and an emoji before the answer: offsets are of characters.
GOOD = ("Tower", "\u00e9\U0001f600 is 300 m.", [("300 m", 6), ("300", 6)])


def test_json_of_squad_is_read_as_it_is(tmp_path):
    other = [(f"t{n}", f"{n} a", [("a", 2)]) for n in range(3)]
    folder = write_squad(tmp_path, squad_file(GOOD, *other), squad_file(GOOD))
    for place in ("data_dir", "manual_dir"):
        splits = load(**{place: folder})
        assert [len(part) for part in splits[:3]] == [4, 0, 1]
        (row,) = splits.test.to_dict("records")
        assert (row["id"], row["title"], row["context"]) == ("q0", *GOOD[:2])
        assert (row["answers"], row["starts"]) == (["300 m", "300"], [6, 6])
        assert splits.notes == ("1 text(s) are in both the train and the test file",)


def test_held_out_are_whole_articles_and_limits_count_questions(tmp_path):
    articles = [(f"t{n // 5}", f"{n} a", [("a", len(f"{n} "))]) for n in range(60)]
    folder = write_squad(tmp_path, squad_file(*articles))
    held_out = {"data__test_file": "", "validation_fraction": 0.25}
    splits = load(folder, **held_out)
    titles = [set(part.title) for part in splits[:3]]
    assert [len(part) for part in titles] == [6, 3, 3]
    assert len(set.union(*titles)) == 12 and splits.notes == ()
    again = load(folder, limit_examples=4, **held_out)
    for part, limited in zip(splits[:3], again[:3], strict=True):
        pd.testing.assert_frame_equal(limited, part.head(4))
    other = load(folder, data__split_seed=1, limit_examples=4, **held_out)
    assert set(other.test.id) != set(again.test.id)


def test_without_titles_a_context_is_on_one_side(tmp_path):
    contexts = [f"{n % 8} A " + " " * (n // 8) for n in range(32)]
    articles = [(None, context, [("A", 2)]) for context in contexts]
    folder = write_squad(tmp_path, squad_file(*articles))
    splits = load(folder, data__test_file="", data__test_fraction=0.5)
    sides = [{context[0] for context in part.context} for part in splits[:3:2]]
    assert sides[0].isdisjoint(sides[1]) and len(splits.test) == 16


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (
            ("t", "a b", [("b", 1)]),
            "the answer 'b' is not in the context at its answer_start 1; there is ' '",
        ),
        (("t", "a b", [("b", -1)]), "the answer 'b' is not in the context"),
        (("t", "a b", [("b", 99)]), "answer_start 99; there is ''"),
        (("t", "a b", [("", 1)]), "the answer '' is not in the context at"),
        (("t", "a b", []), r"it has no answer \(unanswerable questions of SQuAD 2.0"),
        (("t", " ", [(" ", 0)]), "its context or its question is empty"),
    ],
)
def test_bad_questions_are_named_or_skipped_and_counted(tmp_path, bad, expected):
    folder = write_squad(tmp_path, squad_file(GOOD, bad), squad_file(GOOD))
    words = f"train-v1.1.json.*question 'q1': .*{expected}"
    with helpers.one_line(errors.DataError, words):
        load(folder)
    splits = load(folder, data__on_bad_rows="skip")
    assert len(splits.train) == 1 and "1 bad row(s) skipped" in splits.notes


TWICE = squad_file(GOOD)
TWICE["data"] *= 2


@pytest.mark.parametrize(
    ("train", "test", "expected"),
    [
        ("", GOOD, "JSONDecodeError"),
        ('{"data": [', GOOD, "JSONDecodeError"),
        ("[]", GOOD, "TypeError"),
        ('{"data": [{"title": "a"}]}', GOOD, "KeyError: 'paragraphs'"),
        ('{"data": []}', GOOD, "0 and 1 usable question"),
        (json.dumps(TWICE), GOOD, "'q0': its id occurs twice"),
        (None, GOOD, "No file train-v1.1.json.*--manual_dir"),
        (json.dumps(TWICE), None, "dev-v1.1.json cannot be read.*No such"),
    ],
)
def test_files_that_cannot_be_used_are_one_line_errors(tmp_path, train, test, expected):
    folder = write_squad(tmp_path, None, squad_file(test) if test else None)
    if train is not None:
        (tmp_path / "train-v1.1.json").write_text(train)
    with helpers.one_line(errors.DataError, expected):
        load(manual_dir=folder)


ROWS = (
    "textID,text,selected_text,sentiment\n"
    '1," so good, good",good,positive\n'
    "2,very sad,sad,negative\n"
    "3,the day,the day,neutral\n"
    "4,nice one,nice,positive\n"
)


def test_csv_spans_get_their_first_place_and_their_row(tmp_path):
    (tmp_path / "train.csv").write_text(ROWS)
    asked = str(tmp_path), "csv"
    splits = load(*asked, data__test_fraction=0.25, validation_fraction=0.25)
    assert [len(part) for part in splits[:3]] == [2, 1, 1]
    rows = pd.concat(splits[:3]).set_index("id")
    assert sorted(rows.index) == [f"train.csv, row {n}" for n in (2, 3, 4, 5)]
    first = rows.loc["train.csv, row 2"]
    assert (first.context, first.question) == ("so good, good", "positive")
    assert (first.answers, first.starts) == (["good"], [3])
    (tmp_path / "train.csv").write_text(ROWS + "5,fine day,Fine,neutral\n")
    for column, words in (
        ("selected_text", "row 6: the answer 'Fine' is not in"),
        ("answer", "no column 'answer'. Found: 'textID'"),
    ):
        with pytest.raises(errors.DataError, match=words):
            load(*asked, data__answer_column=column)


@pytest.fixture(scope="module")
def tfds_folder(tmp_path_factory):
    """TFDS' squad of a few questions."""
    tfds = pytest.importorskip("tensorflow_datasets")
    folder = str(tmp_path_factory.mktemp("tfds"))
    tfds.disable_progress_bar()
    rows = [
        {
            "id": f"q{n}",
            "title": f"z\u00e9 {n // 2}",
            "context": f"{n} a b",
            "question": "what?",
            "answers": {"text": ["a", "a b"], "answer_start": [len(f"{n} ")] * 2},
        }
        for n in range(12)
    ]
    tfds.dataset_builders.store_as_tfds_dataset(
        name="squad",
        config="v1.1",
        version="3.0.0",
        features=tfds.builder("squad", data_dir=folder).info.features,
        data_dir=folder,
        split_datasets={
            "train": [(row["id"], row) for row in rows[:9]],
            "validation": [(row["id"], row) for row in rows[9:]],
        },
    )
    return folder


def test_squad_of_tfds_is_read_as_it_was_written(tfds_folder):
    splits = load(tfds_folder)
    assert [len(part) for part in splits[:3]] == [9, 0, 3]
    row = splits.test.set_index("id").loc["q10"]
    assert (row.title, row.context) == ("z\u00e9 5", "10 a b")
    assert (row.answers, row.starts) == (["a", "a b"], [3, 3])


# ---- Windows ----


@pytest.fixture(scope="module")
def tokenizer():
    """A token for each letter as a word, and for "##s"."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *LETTERS, "##s", ","])}
    return tokenizers.BertWordPieceTokenizer(vocabulary)


def question(context, answer="a", asked="x y", start=None):
    start = context.index(answer) if start is None else start
    return {
        "context": context,
        "question": asked,
        "answers": [answer],
        "starts": [start],
    }


def cut(tokenizer, *questions, length=10, stride=2, longest=2):
    return squad_windows.cut(
        tokenizer,
        pd.DataFrame(questions),
        length=length,
        doc_stride=stride,
        max_query_length=longest,
    )


def words_of(tokenizer, found, window):
    ids = found.features["token_ids"][window]
    return [tokenizer.id_to_token(int(i)) for i in ids]


def test_inputs_are_cls_question_sep_window_sep_padding(tokenizer):
    found = cut(tokenizer, question("a b"), question("a b c d e f g h i", "e f"))
    rows = [words_of(tokenizer, found, row) for row in range(4)]
    assert rows[0] == "[CLS] x y [SEP] a b [SEP] [PAD] [PAD] [PAD]".split()
    assert [row[4:9] for row in rows[1:]] == [
        list("abcde"),
        list("cdefg"),
        list("efghi"),
    ]
    assert {row[9] for row in rows[1:]} == {"[SEP]"}
    assert found.features["segment_ids"][0].tolist() == [0] * 4 + [1] * 3 + [0] * 3
    assert found.features["padding_mask"][0].tolist() == [1] * 7 + [0] * 3
    assert {v.dtype.name for v in found.features.values()} == {"int32"}
    assert found.labels.tolist() == [[4, 4], [0, 0], [6, 7], [4, 5]]
    assert found.labels.dtype == "int32"
    assert (found.question.tolist(), found.first.tolist()) == (
        [0, 1, 1, 1],
        [0, 0, 2, 4],
    )


@pytest.mark.parametrize(
    ("stride", "expected"),
    [(2, [0, 2, 4, 6]), (5, [0, 5, 10]), (99, [0, 5, 10])],
    ids=["overlap", "none", "no gap"],
)
def test_stride_is_the_step_between_windows_and_no_token_is_left_out(
    tokenizer, stride, expected
):
    letters = LETTERS[: expected[-1] + (4 if stride == 2 else 1)]
    found = cut(tokenizer, question(" ".join(letters)), stride=stride)
    assert found.first.tolist() == expected


@pytest.mark.parametrize(
    ("context", "answer", "start", "expected"),
    [
        ("a bs c", "b", None, [5, 5]),
        ("a bs c", "s", None, [6, 6]),
        ("a b c", " b", 1, [5, 5]),
        ("a b c", "b ", 2, [5, 5]),
        ("a \u200b b", "\u200b", None, [0, 0]),
        ("a b a", "a", 4, [6, 6]),
        ("\u00c1 b", "\u00c1", None, [4, 4]),
    ],
    ids=[
        "start of a word",
        "rest of a word",
        "space before",
        "space after",
        "no token",
        "second occurrence",
        "accent",
    ],
)
def test_label_is_every_token_with_a_character_of_the_answer(
    tokenizer, context, answer, start, expected
):
    found = cut(tokenizer, question(context, answer, start=start), length=16)
    assert found.labels.tolist() == [expected]


def test_long_questions_are_cut_and_counted_and_contexts_never(tokenizer):
    found = cut(
        tokenizer, question("a b c", asked="u vs w x"), question("a b c", asked="u")
    )
    assert found.cut_questions == 1
    assert words_of(tokenizer, found, 0)[:5] == ["[CLS]", "u", "v", "[SEP]", "a"]
    assert words_of(tokenizer, found, 1)[:4] == ["[CLS]", "u", "[SEP]", "a"]
    assert found.features["segment_ids"].sum(axis=1).tolist() == [4, 4]


@pytest.mark.parametrize(
    ("length", "width"), [(10, 10), (64, 16)], ids=["not beyond length", "longest"]
)
def test_width_is_that_of_the_longest_rounded_up(tokenizer, length, width):
    found = cut(tokenizer, question("a b c d e"), length=length)
    assert found.features["token_ids"].shape == (1, width)
    empty = squad_windows.cut(
        tokenizer,
        pd.DataFrame(columns=["context", "question", "answers", "starts"]),
        length=length,
        doc_stride=2,
        max_query_length=2,
    )
    assert empty.labels.shape == (0, 2)  # No validation split.


def test_each_token_is_scored_once_where_most_is_around_it(tokenizer):
    rng = np.random.default_rng(0)
    contexts = [" ".join(rng.choice(LETTERS, size)) for size in range(1, 40, 3)]
    found = cut(
        tokenizer, *(question(c, "", start=0) for c in contexts), length=14, stride=3
    )
    mask = squad_windows.has_most_context(found)
    for number, context in enumerate(contexts):
        rows = np.flatnonzero(found.question == number)
        for token in range(len(context.split())):
            seen = []  # A plain loop: (what is around it, the earlier first, is it on).
            for row in rows:
                inside = np.flatnonzero(found.features["segment_ids"][row])[:-1]
                left = token - found.first[row]
                if 0 <= left < len(inside):
                    around = min(left, len(inside) - 1 - left) + 0.01 * len(inside)
                    seen.append((around, -row, mask[row, inside[left]]))
            assert [on for *_, on in sorted(seen)] == [False] * (len(seen) - 1) + [True]


# ---- Answers ----

CONTEXT = "A  b, c d e"
FLOOR = -50.0


@pytest.fixture(scope="module")
def two(tokenizer):
    """One question on `CONTEXT` in two windows: tokens 0..4 and 1..5."""
    return cut(tokenizer, question(CONTEXT, "b", asked="x"), length=9, stride=1)


def logits_of(found, starts, ends):
    """Returns logits from {(window, token of the context): score}; others are low."""
    rows, length = found.features["token_ids"].shape
    logits = np.full((rows, 2, length), FLOOR, "float32")
    for row, scores in enumerate((starts, ends)):
        for (window, token), score in scores.items():
            logits[window, row, 3 + token - found.first[window]] = score
    return logits


def decode(found, logits, n_best_size=3, max_answer_length=5, context=CONTEXT):
    (answers,) = squad_windows.decode(
        logits,
        found,
        [context],
        n_best_size=n_best_size,
        max_answer_length=max_answer_length,
    )
    return answers


@pytest.mark.parametrize(
    ("starts", "ends", "expected"),
    [
        ({(0, 0): 1}, {(0, 1): 1}, "A  b"),
        ({(0, 1): 1}, {(0, 2): 1}, "b,"),
        ({(0, 0): 1, (1, 4): 2}, {(0, 0): 1, (1, 5): 2}, "d e"),
        ({(0, 2): 9, (0, 0): 1}, {(0, 0): 1}, "A"),
        ({(1, 1): 9, (0, 0): 1}, {(1, 1): 9, (0, 0): 1}, "A"),
        ({(0, 4): 9, (0, 0): 1}, {(0, 4): 1}, "A  b, c d"),
    ],
    ids=[
        "text as in the context, spaces included",
        "up to the punctuation",
        "best over all windows",
        "no end before the start",
        "start where more of its context is seen, first window",
        "start where more of its context is seen, second window",
    ],
)
def test_best_span(two, starts, ends, expected):
    assert decode(two, logits_of(two, starts, ends))[0]["text"] == expected


def test_longest_answer_is_in_tokens(two):
    logits = logits_of(two, {(0, 0): 5, (0, 1): 0}, {(0, 2): 5})
    assert decode(two, logits, max_answer_length=3)[0]["text"] == "A  b,"
    assert decode(two, logits, max_answer_length=2)[0]["text"] == "b,"


@pytest.mark.parametrize(
    ("context", "last", "expected"),
    [
        ("a\u0301 b\u0308\u0301", 0, "a\u0301"),
        ("a\u0301 b\u0308\u0301", 1, "a\u0301 b\u0308\u0301"),
        ("a\u0301, b", 0, "a\u0301"),
    ],
    ids=["between", "at the end", "before a token"],
)
def test_accents_that_are_stripped_belong_to_their_letter(
    tokenizer, context, last, expected
):
    found = cut(tokenizer, question(context, asked="x"), length=9)
    logits = logits_of(found, {(0, 0): 1}, {(0, last): 1})
    assert decode(found, logits, context=context)[0]["text"] == expected


def test_n_best_are_distinct_texts_with_a_softmax_of_their_scores(two):
    starts, ends = {(0, 0): 2.0, (0, 1): 1.0}, {(0, 1): 3.0, (0, 2): 2.5}
    found = decode(two, logits_of(two, starts, ends), n_best_size=4)
    assert [answer["text"] for answer in found] == ["A  b", "A  b,", "b", "b,"]
    totals = np.array([5.0, 4.5, 4.0, 3.5])
    expected = np.exp(totals) / np.exp(totals).sum()
    # Two roundings of a float64 softmax.
    np.testing.assert_allclose(
        [answer["probability"] for answer in found], expected, rtol=1e-14
    )
    assert (found[0]["start_logit"], found[0]["end_logit"]) == (2.0, 3.0)
    assert len(decode(two, logits_of(two, starts, ends), n_best_size=1)) == 1


def test_equal_scores_go_to_the_earlier_window_and_start(two):
    logits = np.zeros((2, 2, two.features["token_ids"].shape[1]), "float32")
    texts = [answer["text"] for answer in decode(two, logits)]
    assert texts == ["A", "A  b", "A  b,"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_give_no_answer(two, value):
    logits = np.full((2, 2, two.features["token_ids"].shape[1]), value, "float32")
    nothing = {"text": "", "probability": 1.0, "start_logit": 0.0, "end_logit": 0.0}
    assert decode(two, logits) == [nothing]
    logits[0, :, 3] = 1
    assert [answer["text"] for answer in decode(two, logits)] == ["A"]


@pytest.mark.parametrize("seed", range(3))
def test_same_as_trying_every_pair(two, seed):
    """Tokens of the question, special ones and padding score as high as others."""
    rng = np.random.default_rng(seed)
    shape = (2, 2, two.features["token_ids"].shape[1])
    logits = rng.normal(size=shape).astype("float32")
    may_start, pairs = squad_windows.has_most_context(two), []
    for window in range(2):
        for s, e in itertools.product(range(3, 8), repeat=2):
            if may_start[window, s] and 0 <= e - s < 3:
                total = float(logits[window, 0, s]) + float(logits[window, 1, e])
                shift = two.first[window] - 3
                begin, end = two.offsets[0][s + shift, 0], two.offsets[0][e + shift, 1]
                pairs.append((total, CONTEXT[begin:end]))
    expected = [text for _, text in sorted(pairs, reverse=True)][:8]
    found = decode(two, logits, n_best_size=8, max_answer_length=3)
    assert [answer["text"] for answer in found] == expected


def test_gold_spans_of_real_questions_decode_to_themselves(shared_data):
    questions = squad_data.read_json(shared_data("xquad_en") / "xquad.en.json")
    learned = encoders.train_tokenizer(questions.context.unique(), 8000)
    found = squad_windows.cut(
        learned, questions, length=384, doc_stride=128, max_query_length=64
    )
    assert len(questions) == 1190 < len(found.question)
    logits = np.zeros((len(found.question), 2, 384), "float32")
    for row in range(2):
        np.put_along_axis(logits[:, row], found.labels[:, row : row + 1], 1, axis=1)
    answers = squad_windows.decode(
        logits, found, questions.context, n_best_size=20, max_answer_length=30
    )
    pairs = zip(questions.id, answers, strict=True)
    scores = answering.score(
        questions, {name: nbest[0]["text"] for name, nbest in pairs}
    )
    assert scores["f1"] >= scores["exact_match"] >= 0.999


# ---- Scores ----


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
        ("a-theme (the)", "atheme", 1, 1, 0),
        ("U.S.A.\tan\n", "usa", 1, 1, 0),
        ("\u201cthe end\u201d", "\u201c end\u201d", 1, 1, 1 / 3),
        ("caf\u00e9", "cafe", 0, 0, 0),
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
        "article next to what was punctuation",
        "abbreviation",
        "quotes that are not ASCII stay",
        "accents stay",
    ],
)
def test_scores_of_one_answer(prediction, gold, exact, f1, jaccard):
    for first, second in ((prediction, gold), (gold, prediction)):
        questions = pd.DataFrame({"id": ["q"], "answers": [[second]]})
        scores = answering.score(
            questions, {"q": first}, ("exact_match", "f1", "jaccard")
        )
        assert list(scores.values()) == pytest.approx([exact, f1, jaccard])


def test_best_answer_counts_and_a_missing_prediction_is_zero():
    questions = pd.DataFrame(
        {
            "id": ["q1", "q2", "q3"],
            "answers": [["Denver", "Denver Broncos"], ["1999"], ["gold"]],
        }
    )
    predictions = {"q1": "the Denver Broncos", "q2": "in 1999", "other": "gold"}
    scores = answering.score(questions, predictions)
    assert scores["f1"] == pytest.approx((1 + 2 / 3) / 3)
    assert scores["exact_match"] == pytest.approx(1 / 3)


# ---- The task ----

LENGTH = 16
NAMES = "ann bob eve joe kim lee may pat ray sue tom zoe".split()
JOBS = "baker clerk judge nurse pilot tutor".split()


FIELDS = {
    **{"validation_fraction": 0.25, "epochs": 1},
    **{"batch_size": 8, "eval_batch_size": 16},
    **{"data__sequence_length": LENGTH, "data__doc_stride": 4},
    **{"data__max_query_length": 3, "data__max_answer_length": 4},
    **{"data__n_best_size": 4, "model__num_layers": 1, "model__num_heads": 2},
    **{"model__hidden_dim": 16, "model__intermediate_dim": 32},
    **{"model__max_sequence_length": LENGTH, "model__vocabulary_size": 200},
}


def make_config(**fields):
    """Spans of a CSV file under a small new encoder; some contexts need two windows."""
    return helpers.configured(question_answering, "csv", **{**FIELDS, **fields})


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


def create(folder, **fields):
    return tasks.from_config(make_config(data_dir=folder, **fields))


@pytest.fixture(scope="module")
def task(folder):
    return create(folder)


def batch_of(task, size=8):
    return next(iter(task.train.batch(size)))


def test_task_has_windows_positions_and_a_description(task, folder):
    features, label = task.train.element_spec
    assert set(features) == {"token_ids", "segment_ids", "padding_mask"}
    assert all(f.shape[0] % 8 == 0 and f.dtype == tf.int32 for f in features.values())
    assert (label.shape, label.dtype) == ((2,), tf.int32)
    for words in (
        "18 train / 7 validation / 7 test questions",
        f"windows of up to {LENGTH} tokens, at most 4 apart",
        "0 of 32 questions cut to 3 tokens",
        "training windows without the whole answer",
        "validation windows without it, which position accuracy counts",
        "encoder: new, 1 layers of 16",
    ):
        assert words in task.description
    again = create(folder)
    tf.nest.map_structure(
        np.testing.assert_array_equal, batch_of(task, 99), batch_of(again, 99)
    )
    default = question_answering.get_config().validation_fraction
    task = create(folder, validation_fraction=default)
    assert task.validation is None and "position accuracy" not in task.description


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
    # The mean of the cross-entropies of first and last token.
    chances = tf.nn.log_softmax(tf.cast(logits, "float64")).numpy()
    gold = np.take_along_axis(chances, labels.numpy()[..., None], axis=2)
    rel = 16 * float(np.finfo("float32").eps)
    assert float(task.loss(labels, logits)) == pytest.approx(-gold.mean(), rel=rel)
    assert [metric.name for metric in task.metrics()] == ["position_accuracy"]


def test_synthetic_batches_fit_the_model():
    # More than the positions.
    made = tasks.synthetic(make_config(data__sequence_length=24))
    features, labels = next(iter(made.batches))
    assert features["token_ids"].shape == (8, 24) and labels.shape == (8, 2)
    loss = float(made.loss(labels, made.build_model()(features)))
    assert loss == pytest.approx(np.log(24), rel=0.05)  # It knows nothing yet.


def test_small_model_learns_to_answer(folder, tmp_path):
    task = create(folder, model__dropout=0.0)
    model = task.build_model()
    model.compile(keras.optimizers.Adam(1e-2), task.loss, metrics=task.metrics())
    untrained = task.score(model, tmp_path)
    everything = task.train.concatenate(task.validation).concatenate(task.test)
    model.fit(everything.batch(64).cache(), epochs=150, shuffle=False, verbose=0)
    assert untrained["f1"] < 0.8
    scores = task.score(model, tmp_path)
    assert scores == {"jaccard": 1.0, "f1": 1.0, "exact_match": 1.0}


def test_run_writes_predictions_that_score_what_it_says(folder, tmp_path):
    config = make_config(data_dir=folder, precision__mode="mixed_bfloat16")
    result = trainer.train_and_evaluate(config, tmp_path)
    assert result.score_name == "jaccard"
    assert set(result.scores) == {"jaccard", "f1", "exact_match", "position_accuracy"}
    best = json.loads((tmp_path / "predictions.json").read_text())
    nbest = json.loads((tmp_path / "nbest_predictions.json").read_text())
    rows = pathlib.Path(folder, "train.csv").read_text().split("\n")
    gold = {name: rows[int(name.split()[-1]) - 1].split(",")[2] for name in best}
    f1 = np.mean([answering.f1(best[name], gold[name]) for name in best])
    assert len(best) == 7 and result.scores["f1"] == pytest.approx(f1)
    assert {name: answers[0]["text"] for name, answers in nbest.items()} == best
    for answers in nbest.values():
        chances = [answer["probability"] for answer in answers]
        assert 1 <= len(chances) <= 4 and chances == sorted(chances, reverse=True)
        assert sum(chances) == pytest.approx(1)
    saved = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert saved.encode("ann is judge").tokens[0] == "[CLS]"
    asked = pathlib.Path(f"{folder}/train.csv"), tmp_path / "answers.jsonl"
    assert trained.predict(config, tmp_path, *asked) == (
        len(rows) - 2,
        "best.weights.h5",
    )
    answers = [json.loads(x)["answer"] for x in asked[1].read_text().splitlines()]
    for name, text in best.items():
        assert answers[int(name.split()[-1]) - 2] == text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"data__max_query_length": 13},
            "below sequence_length - 3. Received: max_query",
        ),
        ({"data__sequence_length": 24}, "Received: 24, positions: 16"),
    ],
    ids=["question", "positions"],
)
def test_settings_that_make_no_sense_are_refused(folder, changes, expected):
    with pytest.raises(ValueError, match=expected):
        create(folder, **changes)
