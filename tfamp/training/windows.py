"""Questions with windows of their contexts, as BERT reads them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tfamp.training import squad, token_cache, tokens

_SPECIAL = 3  # [CLS] question [SEP] window [SEP]
_CHUNK = 10_000  # Texts at a time: the tokenizer's objects are 100 times the ids.


class Windows(NamedTuple):
    """Inputs of BERT, one for each window, and how to get back to the texts.

    Attributes:
      features: {token_ids, segment_ids, padding_mask}, each int32 [windows, length].
      labels: int32 [windows, 2]: first and last token of the question's first answer.
        (0, 0), which is [CLS], where the window does not hold all of it.
      question: int32 [windows]: index of the window's question; never falls.
      first: int32 [windows]: index in the context of the window's first token.
      count: int32 [windows]: tokens of the context in the window.
      prefix: int32 [windows]: place in the input of the window's first token.
      offsets: For each question int32 [tokens of its context, 2]: the characters
        [start, end) of each token.
      cut_questions: How many questions were cut.
    """

    features: dict[str, np.ndarray]
    labels: np.ndarray
    question: np.ndarray
    first: np.ndarray
    count: np.ndarray
    prefix: np.ndarray
    offsets: tuple[np.ndarray, ...]
    cut_questions: int


class _Text(NamedTuple):
    """Tokens of a text, without special ones."""

    ids: np.ndarray
    offsets: np.ndarray


def check_settings(sequence_length: int, doc_stride: int, max_query_length: int):
    """Raises ValueError if a context could not move through its windows."""
    if doc_stride < 1:
        raise ValueError(
            f"`config.data.doc_stride` must be >= 1. Received: {doc_stride}"
        )
    if not 1 <= max_query_length < sequence_length - _SPECIAL:
        raise ValueError(
            "`config.data.max_query_length` must be at least 1 and leave tokens for "
            f"the context: below sequence_length - {_SPECIAL}. Received: "
            f"max_query_length={max_query_length}, sequence_length={sequence_length}."
        )


def cut(
    tokenizer: Any,
    questions: Sequence[squad.Question],
    *,
    length: int,
    doc_stride: int,
    max_query_length: int,
    positions: int | None = None,
    cache: str = token_cache.OFF,
) -> Windows:
    """Cuts contexts into windows, each with its question before it.

    As in Google's `run_squad.py`, `doc_stride` is how far the next window's start lies
    behind that of the one before (Hugging Face's setting of that name is how far they
    overlap), and a question's last tokens are left out, never the context's.

        [CLS] question [SEP] window of the context [SEP] [PAD] ...
        segment: 0 ... 0     1 ... 1                     0

    Args:
      tokenizer: A `tokenizers` tokenizer with BERT's special tokens; its truncation
        and padding are unset.
      questions: Questions.
      length: Most tokens of an input, special ones included.
      doc_stride: Tokens from one window's start to the next.
      max_query_length: Most tokens of a question.
      positions: Positions of the encoder, which padding does not exceed; None:
        `length`.
      cache: Where tokens are kept; see `token_cache.find_folder`. Those of fewer than
        `tokens.FEWEST_CACHED` distinct texts are not.

    Returns:
      `Windows`, in the order of the questions. Inputs are padded to the longest,
      rounded up to a multiple of 8.

    References:
      Devlin et al., "BERT", 2019, https://arxiv.org/abs/1810.04805
      https://github.com/google-research/bert/blob/master/run_squad.py
    """
    check_settings(length, doc_stride, max_query_length)
    texts = dict.fromkeys(text for q in questions for text in (q.question, q.context))
    found = _tokenize(tokenizer, list(texts), cache)
    pairs = [(found[q.question], found[q.context]) for q in questions]
    windows = _places(pairs, length, doc_stride, max_query_length)
    longest = int((windows.prefix + windows.count + 1).max(initial=1))
    width = min(tokens.round_up(longest), max(length, positions or 0))
    special = [tokenizer.token_to_id(t) for t in ("[PAD]", "[CLS]", "[SEP]")]
    features = _features(windows, pairs, special, width)
    return windows._replace(features=features, labels=_labels(windows, questions))


def window_starts(total: int, room: int, doc_stride: int) -> list[int]:
    """Returns where windows start; the last one is the first to reach the end.

    Args:
      total: Tokens of the context.
      room: Most tokens of a window.
      doc_stride: Tokens from one start to the next; no more than `room` are moved,
        so that no token is left out.

    Returns:
      Rising indices from 0, one at least.
    """
    starts = [0]
    while starts[-1] + room < total:
        starts.append(starts[-1] + min(room, doc_stride))
    return starts


def has_most_context(windows: Windows) -> np.ndarray:
    """Tells for each token whether no other window shows more of what is around it.

    A token in several windows is scored where the smaller of its left and right
    contexts is largest (plus a hundredth of the window, which matters for the last,
    shorter one); of equals in the first. This is the "max context" rule of
    `run_squad.py`.

    Args:
      windows: Of `cut`.

    Returns:
      bool [windows, length]; false for what is not of the context.
    """
    sizes = [len(offsets) for offsets in windows.offsets]
    # One row of cells for the tokens of all questions.
    start = np.concatenate([[0], np.cumsum(sizes)])[windows.question] + windows.first
    most, owner = np.full(sum(sizes), -np.inf), np.full(sum(sizes), -1)
    for number, (begin, count) in enumerate(zip(start, windows.count, strict=True)):
        cells = slice(begin, begin + count)
        left = np.arange(count)
        score = np.minimum(left, count - 1 - left) + 0.01 * count
        better = score > most[cells]
        most[cells][better] = score[better]
        owner[cells][better] = number
    mask = np.zeros(windows.features["token_ids"].shape, bool)
    for number, (begin, count) in enumerate(zip(start, windows.count, strict=True)):
        prefix = windows.prefix[number]
        mask[number, prefix : prefix + count] = owner[begin : begin + count] == number
    return mask


def _tokenize(tokenizer, texts, cache) -> dict[str, _Text]:
    """Returns the tokens of each text."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    arrays = token_cache.remember(
        cache if len(texts) >= tokens.FEWEST_CACHED else token_cache.OFF,
        ("windows", tokenizer.to_str(), texts),
        ("ids", "offsets", "sizes"),
        lambda: _encode(tokenizer, texts),
    )
    ends = np.cumsum(arrays["sizes"])  # Behind the last one nothing is left.
    parts = (np.split(arrays[name], ends)[:-1] for name in ("ids", "offsets"))
    return dict(zip(texts, map(_Text, *parts), strict=True))


def _encode(tokenizer, texts) -> dict[str, np.ndarray]:
    """Returns the tokens of all texts, one after another, and how many each has."""
    ids, offsets = [np.zeros(0, "int32")], [np.zeros((0, 2), "int32")]
    for start in range(0, len(texts), _CHUNK):
        chunk = texts[start : start + _CHUNK]
        for item in tokenizer.encode_batch(chunk, add_special_tokens=False):
            ids.append(np.array(item.ids, "int32"))
            offsets.append(np.array(item.offsets, "int32").reshape(-1, 2))
    return {
        "ids": np.concatenate(ids),
        "offsets": np.concatenate(offsets),
        "sizes": np.array([len(part) for part in ids[1:]], "int32"),
    }


def _places(pairs, length, doc_stride, max_query_length) -> Windows:
    """Returns where the windows of (question, context) pairs are; no arrays yet."""
    places = []
    for number, (query, context) in enumerate(pairs):
        total = len(context.ids)
        asked = min(len(query.ids), max_query_length)
        room = length - asked - _SPECIAL
        for first in window_starts(total, room, doc_stride):
            places.append((number, first, min(room, total - first), asked + 2))
    question, first, count, prefix = np.array(places, "int32").reshape(-1, 4).T
    return Windows(
        features={},
        labels=np.zeros((0, 2), "int32"),
        question=question,
        first=first,
        count=count,
        prefix=prefix,
        offsets=tuple(context.offsets for _, context in pairs),
        cut_questions=sum(len(query.ids) > max_query_length for query, _ in pairs),
    )


def _features(windows, pairs, special, width):
    """Returns the input arrays; `pairs` are the tokens of each question and context."""
    padding, begin, separator = special
    shape = (len(windows.question), width)
    ids = np.full(shape, padding, "int32")
    segments, mask = np.zeros(shape, "int32"), np.zeros(shape, "int32")
    rows = zip(
        windows.question, windows.first, windows.count, windows.prefix, strict=True
    )
    for row, (question, first, count, prefix) in enumerate(rows):
        query, context = pairs[question]
        end = prefix + count
        ids[row, 0] = begin
        ids[row, 1 : prefix - 1] = query.ids[: prefix - 2]
        ids[row, [prefix - 1, end]] = separator
        ids[row, prefix:end] = context.ids[first : first + count]
        segments[row, prefix : end + 1] = 1
        mask[row, : end + 1] = 1
    return {"token_ids": ids, "segment_ids": segments, "padding_mask": mask}


def _labels(windows, questions):
    """Returns first and last token of each answer where its window holds it."""
    spans = [
        _token_span(offsets, question.answers[0])
        for offsets, question in zip(windows.offsets, questions, strict=True)
    ]
    span = np.array(spans, "int32").reshape(-1, 2)[windows.question]
    place = span - windows.first[:, None]
    held = (
        (place[:, 0] >= 0)
        & (place[:, 1] < windows.count)
        & (place[:, 0] <= place[:, 1])
    )
    return np.where(held[:, None], place + windows.prefix[:, None], 0).astype("int32")


def _token_span(offsets, answer):
    """Returns the first and the last token with a character of the answer."""
    begins, ends = offsets[:, 0], offsets[:, 1]
    first = np.searchsorted(ends, answer.start, side="right")
    last = np.searchsorted(begins, answer.start + len(answer.text), side="left") - 1
    return first, last  # first > last: none of its characters is in a token.
