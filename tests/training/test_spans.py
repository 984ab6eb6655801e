import itertools

import numpy as np
import pytest

from tfamp.training import pretrained, spans, squad, windows

pytest.importorskip("tokenizers")

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CONTEXT = "Alpha  beta, gamma delta epsilon zeta"
TOKENS = ["alpha", "beta", ",", "gamma", "delta", "epsilon", "zeta"]
LENGTH = 9  # [CLS] who [SEP] + 5 tokens + [SEP]: windows 0..4 and 2..6.
FLOOR = -50.0


@pytest.fixture(scope="module")
def cut():
    """One question on `CONTEXT` in two windows, the second one two tokens later."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *TOKENS, "who"])}
    tokenizer = pretrained.require("tokenizers").BertWordPieceTokenizer(vocabulary)
    answers = (squad.Answer("Alpha", 0),)
    question = squad.Question("q", "", CONTEXT, "who", answers)
    return windows.cut(
        tokenizer, [question], length=LENGTH, doc_stride=2, max_query_length=1
    )


def logits_of(cut, starts, ends):
    """Returns logits from {(window, token of the context): score}; others are low."""
    shape = cut.features["token_ids"].shape
    logits = np.full((shape[0], 2, shape[1]), FLOOR, "float32")
    for row, scores in enumerate((starts, ends)):
        for (window, token), score in scores.items():
            logits[window, row, cut.prefix[window] + token - cut.first[window]] = score
    return logits


def decode(cut, logits, n_best_size=3, max_answer_length=5, contexts=(CONTEXT,)):
    return spans.decode(
        logits,
        cut,
        contexts,
        n_best_size=n_best_size,
        max_answer_length=max_answer_length,
    )


def best(cut, starts, ends, **settings):
    return decode(cut, logits_of(cut, starts, ends), **settings)[0][0].text


@pytest.mark.parametrize(
    ("starts", "ends", "expected"),
    [
        ({(0, 0): 1}, {(0, 1): 1}, "Alpha  beta"),
        ({(0, 1): 1}, {(0, 1): 1}, "beta"),
        ({(0, 1): 1}, {(0, 2): 1}, "beta,"),
        ({(0, 0): 1, (1, 5): 2}, {(0, 0): 1, (1, 6): 2}, "epsilon zeta"),
        ({(0, 2): 9, (0, 0): 1}, {(0, 0): 1}, "Alpha"),
        ({(1, 2): 9, (0, 0): 1}, {(1, 2): 9, (0, 0): 1}, "Alpha"),
        ({(0, 4): 9, (0, 0): 1}, {(0, 4): 1}, "Alpha  beta, gamma delta"),
    ],
    ids=[
        "text as in the context, spaces included",
        "one token",
        "up to the punctuation",
        "best over all windows",
        "no end before the start",
        "start where more of its context is seen, first window",
        "start where more of its context is seen, second window",
    ],
)
def test_best_span(cut, starts, ends, expected):
    assert best(cut, starts, ends) == expected


@pytest.mark.parametrize(
    ("context", "last", "expected"),
    [
        ("Alpha\u0301 beta\u0308\u0301", 0, "Alpha\u0301"),
        ("Alpha\u0301 beta\u0308\u0301", 1, "Alpha\u0301 beta\u0308\u0301"),
        ("Alpha\u0301, beta", 0, "Alpha\u0301"),
    ],
    ids=["between", "at the end", "before a token"],
)
def test_accents_that_are_stripped_belong_to_their_letter(context, last, expected):
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *TOKENS])}
    tokenizer = pretrained.require("tokenizers").BertWordPieceTokenizer(vocabulary)
    question = squad.Question("q", "", context, "beta", (squad.Answer("Alpha", 0),))
    cut = windows.cut(
        tokenizer, [question], length=LENGTH, doc_stride=2, max_query_length=1
    )
    logits = logits_of(cut, {(0, 0): 1}, {(0, last): 1})
    assert decode(cut, logits, contexts=[context])[0][0].text == expected


def test_longest_answer_is_in_tokens(cut):
    starts, ends = {(0, 0): 5, (0, 1): 0}, {(0, 2): 5}
    assert best(cut, starts, ends, max_answer_length=3) == "Alpha  beta,"
    assert best(cut, starts, ends, max_answer_length=2) == "beta,"


def test_question_special_tokens_and_padding_are_never_chosen(cut):
    logits = logits_of(cut, {(0, 0): 1}, {(0, 1): 1})
    for window in range(len(cut.question)):
        inside = np.zeros(logits.shape[2], bool)
        inside[cut.prefix[window] :][: cut.count[window]] = True
        logits[window][:, ~inside] = 99
    assert decode(cut, logits)[0][0].text == "Alpha  beta"


def test_n_best_are_distinct_texts_with_a_softmax_of_their_scores(cut):
    starts, ends = {(0, 0): 2.0, (0, 1): 1.0}, {(0, 1): 3.0, (0, 2): 2.5}
    found = decode(cut, logits_of(cut, starts, ends), n_best_size=4)[0]
    texts = ["Alpha  beta", "Alpha  beta,", "beta", "beta,"]
    assert [span.text for span in found] == texts
    totals = np.array([5.0, 4.5, 4.0, 3.5])
    expected = np.exp(totals) / np.exp(totals).sum()
    # Two roundings of a float64 softmax.
    np.testing.assert_allclose([s.probability for s in found], expected, rtol=1e-14)
    assert (found[0].start_logit, found[0].end_logit) == (2.0, 3.0)
    assert len(decode(cut, logits_of(cut, starts, ends), n_best_size=1)[0]) == 1


def test_equal_scores_go_to_the_earlier_window_and_start(cut):
    logits = np.zeros((2, 2, cut.features["token_ids"].shape[1]), "float32")
    found = decode(cut, logits, n_best_size=3)[0]
    assert [span.text for span in found] == ["Alpha", "Alpha  beta", "Alpha  beta,"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_give_no_answer(cut, value):
    logits = np.full((2, 2, cut.features["token_ids"].shape[1]), value, "float32")
    assert decode(cut, logits) == [[spans.Span("", 1.0, 0.0, 0.0)]]
    logits[0, :, cut.prefix[0]] = 1
    assert [span.text for span in decode(cut, logits)[0]] == ["Alpha"]


@pytest.mark.parametrize("seed", range(5))
def test_same_as_trying_every_pair(cut, seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(2, 2, cut.features["token_ids"].shape[1]))
    logits = logits.astype("float32")
    found = decode(cut, logits, n_best_size=8, max_answer_length=3)[0]
    expected = every_pair(cut, logits, 3)
    assert [span.text for span in found] == expected[:8]


def every_pair(cut, logits, longest):
    """Returns all texts, the best first: a plain loop over windows and tokens."""
    may_start = windows.has_most_context(cut)
    pairs = []
    for window in range(len(cut.question)):
        prefix, count = cut.prefix[window], cut.count[window]
        for s, e in itertools.product(range(prefix, prefix + count), repeat=2):
            if may_start[window, s] and 0 <= e - s < longest:
                total = float(logits[window, 0, s]) + float(logits[window, 1, e])
                shift = cut.first[window] - prefix
                begin, end = cut.offsets[0][s + shift, 0], cut.offsets[0][e + shift, 1]
                pairs.append((total, CONTEXT[begin:end]))
    return [text for _, text in sorted(pairs, reverse=True)]


@pytest.mark.parametrize("name", ["n_best_size", "max_answer_length"])
def test_settings_that_find_nothing_are_refused(cut, name):
    logits = logits_of(cut, {}, {})
    with pytest.raises(ValueError, match=f"{name}` must be >= 1. Received: 0"):
        decode(cut, logits, **{name: 0})


def test_logits_of_another_shape_are_refused(cut):
    with pytest.raises(ValueError, match=r"\(2, 2, 9\). Received: \(2, 9, 2\)"):
        decode(cut, logits_of(cut, {}, {}).transpose(0, 2, 1))
