import numpy as np
import pytest

from tfamp.training import (
    pretrained,
    spans,
    squad,
    squad_scores,
    tokens,
    windows,
)

pytest.importorskip("tokenizers")

LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture(scope="module")
def tokenizer():
    """A token for each letter as a word, and for "##s"."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *LETTERS, "##s"])}
    return pretrained.require("tokenizers").BertWordPieceTokenizer(vocabulary)


def question(context, answer="a", asked="x y", start=None, name="q"):
    start = context.index(answer) if start is None else start
    answers = (squad.Answer(answer, start),)
    return squad.Question(name, "", context, asked, answers)


def cut(tokenizer, questions, length=10, stride=2, longest=2, positions=None):
    return windows.cut(
        tokenizer,
        questions,
        length=length,
        doc_stride=stride,
        max_query_length=longest,
        positions=positions,
    )


def words_of(tokenizer, found, window):
    ids = found.features["token_ids"][window]
    return [tokenizer.id_to_token(int(i)) for i in ids]


def test_inputs_are_cls_question_sep_window_sep_padding(tokenizer):
    found = cut(tokenizer, [question("a b c")], length=10)
    expected = "[CLS] x y [SEP] a b c [SEP]".split()
    assert words_of(tokenizer, found, 0) == expected
    np.testing.assert_array_equal(
        found.features["segment_ids"], [[0, 0, 0, 0, 1, 1, 1, 1]]
    )
    np.testing.assert_array_equal(found.features["padding_mask"], np.ones((1, 8)))
    assert {v.dtype.name for v in found.features.values()} == {"int32"}
    assert (found.labels.dtype.name, found.labels.tolist()) == ("int32", [[4, 4]])


def test_single_windows_are_what_the_tokenizer_makes_of_pairs(tokenizer):
    pairs = [("x", "a b c s"), ("x y z", "as bs."), ("é Z", "A\tb\n\nc d e f g")]
    questions = [question(c, c[0], asked=q, name=q) for q, c in pairs]
    found = cut(tokenizer, questions, length=32, longest=5)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for row, pair in enumerate(pairs):
        expected = tokenizer.encode(*pair)
        used = found.features["padding_mask"][row].sum()
        for name, value in (("token_ids", "ids"), ("segment_ids", "type_ids")):
            assert found.features[name][row, :used].tolist() == getattr(expected, value)
        assert not found.features["token_ids"][row, used:].any()


def test_windows_are_the_tokenizers_with_its_stride_as_the_overlap(tokenizer):
    # An independent implementation: there `stride` is how far windows overlap.
    context = " ".join(LETTERS)
    found = cut(tokenizer, [question(context)], length=16, stride=3)
    room = 16 - 2 - 3
    tokenizer.enable_truncation(16, stride=room - 3, strategy="only_second")
    whole = tokenizer.encode("x y", context)
    tokenizer.no_truncation()
    for row, expected in enumerate([whole, *whole.overflowing]):
        used = len(expected.ids)
        assert found.features["token_ids"][row, :used].tolist() == expected.ids
        assert found.features["segment_ids"][row, :used].tolist() == expected.type_ids
        offsets = found.offsets[0][found.first[row] :][: found.count[row]].tolist()
        assert offsets == [list(pair) for pair in expected.offsets[4:-1]]
        assert found.prefix[row] == 4
    assert len(found.question) == 1 + len(whole.overflowing) > 3


@pytest.mark.parametrize(
    ("total", "room", "stride", "expected"),
    [
        (5, 5, 2, [0]),
        (6, 5, 2, [0, 2]),
        (10, 5, 2, [0, 2, 4, 6]),
        (11, 5, 5, [0, 5, 10]),
        (11, 5, 99, [0, 5, 10]),
        (0, 5, 2, [0]),
    ],
    ids=[
        "fits",
        "one more",
        "the last window ends at the end",
        "no overlap",
        "no gap",
        "no token",
    ],
)
def test_stride_is_the_step_between_windows(total, room, stride, expected):
    assert windows.window_starts(total, room, stride) == expected


def test_windows_cover_the_context_and_labels_are_where_the_answer_is(tokenizer):
    found = cut(tokenizer, [question("a b c d e f g h i", "e f")])  # Room for 5.
    assert [words_of(tokenizer, found, w)[4:9] for w in range(3)] == [
        list("abcde"),
        list("cdefg"),
        list("efghi"),
    ]
    assert found.labels.tolist() == [[0, 0], [6, 7], [4, 5]]
    assert found.question.tolist() == [0, 0, 0]
    assert found.first.tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    ("context", "answer", "start", "expected"),
    [
        ("a bs c", "b", None, [5, 5]),
        ("a bs c", "s", None, [6, 6]),
        ("a b c", " b", 1, [5, 5]),
        ("a b c", "b ", 2, [5, 5]),
        ("a \u200b b", "\u200b", None, [0, 0]),
        ("a b a", "a", 4, [6, 6]),
        ("Á b", "Á", None, [4, 4]),
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
    found = cut(tokenizer, [question(context, answer, start=start)], length=16)
    assert found.labels.tolist() == [expected]


def test_long_questions_are_cut_and_counted_and_contexts_never(tokenizer):
    questions = [
        question("a b c", asked="u v w x", name="long"),
        question("a b c", asked="u", name="short"),
    ]
    found = cut(tokenizer, questions)
    assert found.cut_questions == 1
    assert words_of(tokenizer, found, 0)[:4] == ["[CLS]", "u", "v", "[SEP]"]
    assert words_of(tokenizer, found, 1)[:4] == ["[CLS]", "u", "[SEP]", "a"]
    assert found.count.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("length", "positions", "width"),
    [(10, None, 10), (10, 12, 12), (10, 512, 16), (64, None, 16)],
    ids=["not beyond length", "not beyond positions", "of 8", "of the longest"],
)
def test_width_is_that_of_the_longest_rounded_up(tokenizer, length, positions, width):
    questions = [question("a b c d e")]
    found = cut(tokenizer, questions, length=length, positions=positions)
    assert found.features["token_ids"].shape == (1, width)


def test_second_time_reads_the_tokens_that_the_first_kept(
    tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(tokens, "FEWEST_CACHED", 3)
    questions = [question("a b c"), question("é d", "d", asked="", name="empty")]

    def run(cache):
        return windows.cut(
            tokenizer,
            questions,
            length=10,
            doc_stride=2,
            max_query_length=2,
            cache=cache,
        )

    expected = run("off")
    assert list(tmp_path.iterdir()) == []
    run(str(tmp_path))
    (path,) = tmp_path.iterdir()
    monkeypatch.setattr(windows, "_encode", None)  # No text is tokenized again.
    again = run(str(tmp_path))
    for name, values in expected.features.items():
        np.testing.assert_array_equal(again.features[name], values)
    np.testing.assert_array_equal(again.labels, expected.labels)
    for offsets, others in zip(again.offsets, expected.offsets, strict=True):
        np.testing.assert_array_equal(offsets, others)
        assert offsets.dtype == others.dtype
    assert list(tmp_path.iterdir()) == [path]


def test_no_questions_are_no_windows(tokenizer):
    found = cut(tokenizer, [])
    assert found.labels.shape == (0, 2) and len(found.question) == 0


def test_token_is_scored_where_most_is_around_it(tokenizer):
    found = cut(tokenizer, [question("a b c d e f g h i")])
    mask = windows.has_most_context(found)
    shown = [
        [
            w
            for w, on in zip(words_of(tokenizer, found, row), mask[row], strict=True)
            if on
        ]
        for row in range(3)
    ]
    # Two windows show the same around d, and around f: the first counts. Of e, the
    # one in the middle shows two tokens on each side.
    assert shown == [list("abcd"), list("ef"), list("ghi")]


def test_each_token_is_scored_once_in_random_windows(tokenizer):
    rng = np.random.default_rng(0)
    questions = [
        question(" ".join(rng.choice(LETTERS, size)), "", start=0, name=str(size))
        for size in range(1, 40, 3)
    ]
    found = cut(tokenizer, questions, length=14, stride=3)
    mask = windows.has_most_context(found)
    place = np.arange(mask.shape[1]) - found.prefix[:, None] + found.first[:, None]
    for number, offsets in enumerate(found.offsets):
        rows = found.question == number
        scored = np.sort(place[rows][mask[rows]])
        np.testing.assert_array_equal(scored, np.arange(len(offsets)))


@pytest.mark.parametrize(
    ("length", "stride", "longest", "expected"),
    [
        (10, 0, 2, "doc_stride` must be >= 1. Received: 0"),
        (10, 2, 0, "max_query_length` must be at least 1.*max_query_length=0"),
        (10, 2, 7, "below sequence_length - 3.*max_query_length=7, sequence_length=10"),
    ],
)
def test_settings_that_leave_no_room_are_refused(
    tokenizer, length, stride, longest, expected
):
    with pytest.raises(ValueError, match=expected):
        cut(tokenizer, [question("a b")], length, stride, longest)


# ---- Real questions ----


@pytest.fixture(scope="module")
def read_xquad():
    """Returns a function: folder -> (questions, tokenizer trained on them)."""

    def read(folder):
        questions = squad.read_json(folder / "xquad.en.json")
        contexts = list(dict.fromkeys(q.context for q in questions))
        return questions, tokens.train(contexts, 8000)

    return read


def test_gold_spans_of_real_questions_decode_to_themselves(shared_data, read_xquad):
    questions, tokenizer = read_xquad(shared_data("xquad_en"))
    found = cut(tokenizer, questions, 384, 128, 64, positions=512)
    assert len(questions) == 1190 < len(found.question)
    logits = np.zeros((len(found.question), 2, 384), "float32")
    for row in range(2):
        np.put_along_axis(logits[:, row], found.labels[:, row : row + 1], 1, axis=1)
    answers = spans.decode(
        logits,
        found,
        [q.context for q in questions],
        n_best_size=20,
        max_answer_length=30,
    )
    predictions = {
        q.id: nbest[0].text for q, nbest in zip(questions, answers, strict=True)
    }
    scores = squad_scores.score(questions, predictions)
    assert scores["exact_match"] >= 0.999
    assert scores["f1"] >= scores["exact_match"]
