"""Questions with windows of their contexts, and answers from the scores of tokens."""

import functools
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import numpy as np

from tfamp import extras

if TYPE_CHECKING:
    import pandas

SPECIAL = 3  # [CLS] question [SEP] window [SEP]


class Windows(NamedTuple):
    """Inputs of BERT, one for each window, and how to get back to the texts.

    Attributes:
      features: {token_ids, segment_ids, padding_mask}, each int32 [windows, length].
      labels: int32 [windows, 2]: first and last token of the question's first answer.
        (0, 0), which is [CLS], where the window does not hold all of it.
      question: int32 [windows]: index of the window's question; never falls.
      first: int32 [windows]: index in the context of the window's first token.
      offsets: For each question int32 [tokens of its context, 2]: the characters
        [start, end) of each token.
      cut_questions: How many questions were cut.
    """

    features: dict[str, np.ndarray]
    labels: np.ndarray
    question: np.ndarray
    first: np.ndarray
    offsets: Sequence[np.ndarray]
    cut_questions: int


def cut(
    tokenizer: Any,
    questions: "pandas.DataFrame",
    *,
    length: int,
    doc_stride: int,
    max_query_length: int,
) -> Windows:
    """Cuts contexts into windows, each with its question before it.

    As in Google's `run_squad.py`, `doc_stride` is how far the next window's start lies
    behind that of the one before (Hugging Face's setting of that name is how far they
    overlap), and a question's last tokens are left out, never the context's.

        [CLS] question [SEP] window of the context [SEP] [PAD] ...
        segment: 0 ... 0     1 ... 1                     0

    Args:
      tokenizer: A `tokenizers` tokenizer with BERT's special tokens, which neither
        truncates nor pads.
      questions: Columns context, question, answers, starts as of `squad_data.load`.
      length: Most tokens of an input, special ones included.
      doc_stride: Tokens from one window's start to the next; no more than a window has
        are moved, so that no token is left out.
      max_query_length: Most tokens of a question; below `length` - `SPECIAL`.

    Returns:
      `Windows`, in the order of the questions. Inputs are padded to the longest,
      rounded up to a multiple of 8 if `length` allows it.

    References:
      Devlin et al., "BERT", 2019, https://arxiv.org/abs/1810.04805
      https://github.com/google-research/bert/blob/master/run_squad.py
    """
    encode = functools.partial(tokenizer.encode_batch, add_special_tokens=False)
    texts = list(questions.context.unique())
    contexts = {
        text: (encoding.ids, np.array(encoding.offsets, "int32").reshape(-1, 2))
        for text, encoding in zip(texts, encode(texts), strict=True)
    }
    queries = [encoding.ids for encoding in encode(list(questions.question))]
    cls, sep, pad = map(tokenizer.token_to_id, ("[CLS]", "[SEP]", "[PAD]"))
    inputs, rows = [], []
    pairs = zip(queries, questions.itertuples(), strict=True)
    for number, (query, item) in enumerate(pairs):
        ids, offsets = contexts[item.context]
        prefix = [cls, *query[:max_query_length], sep]
        room = length - len(prefix) - 1
        step = min(doc_stride, room)
        begin, end = _token_span(offsets, item.starts[0], item.answers[0])
        for first in range(0, max(len(ids) - room, 0) + step, step):
            inputs.append([*prefix, *ids[first : first + room], sep])
            shift = len(prefix) - first
            whole = first <= begin <= end < first + room
            span = (begin + shift, end + shift) if whole else (0, 0)
            rows.append((number, first, len(prefix), len(inputs[-1]), *span))
    question, first, prefixes, sizes, *labels = np.array(rows, "int32").reshape(-1, 6).T
    width = min(-(-max(sizes, default=1) // 8) * 8, length)
    places = np.arange(width)
    mask = places < sizes[:, None]
    features = {
        "token_ids": keras.utils.pad_sequences(
            inputs, width, padding="post", value=pad
        ),
        "segment_ids": (mask & (places >= prefixes[:, None])).astype("int32"),
        "padding_mask": mask.astype("int32"),
    }
    return Windows(
        features,
        np.stack(labels, axis=1),
        question,
        first,
        [contexts[text][1] for text in questions.context],
        sum(len(query) > max_query_length for query in queries),
    )


def decode(
    logits: np.ndarray,
    windows: Windows,
    contexts: Sequence[str],
    *,
    n_best_size: int,
    max_answer_length: int,
) -> list[list[dict[str, Any]]]:
    """Finds the best answers of each question over all its windows.

    In each window the `n_best_size` best starts meet as many best ends. A pair counts
    if

    * both tokens are of the context and have finite scores,
    * no other window shows more of what is around the start,
    * the end is not before the start,
    * it has at most `max_answer_length` tokens.

    The best pairs of all windows are the question's, of pairs with the same text the
    best one. Of equal scores the earlier window, then the better and then the earlier
    start comes first. `run_squad.py` of Google's BERT does the same, but lets tokens
    that cannot be chosen take places among its best starts and ends.

    Args:
      logits: float32 [windows, 2, length]: scores of the first and the last token.
      windows: Of `cut`.
      contexts: The context of each question.
      n_best_size: Starts, ends and answers that are considered.
      max_answer_length: Most tokens of an answer.

    Returns:
      For each question up to `n_best_size` answers, one at least, the best first: text,
      as the context has it ("" if no answer is possible), probability, the softmax of
      start_logit + end_logit over the question's answers, start_logit and end_logit.
    """
    in_context = _in_context(windows)
    shift = windows.first - in_context.argmax(axis=1)  # From place in the input.
    starts, start_scores = _best(logits[:, 0], has_most_context(windows), n_best_size)
    ends, end_scores = _best(logits[:, 1], in_context, n_best_size)
    # In float64: sums of different float32 scores are not equal.
    totals = start_scores[:, :, None] + end_scores[:, None, :]
    size = ends[:, None, :] - starts[:, :, None] + 1
    totals[(size < 1) | (size > max_answer_length)] = -np.inf
    bounds = np.searchsorted(windows.question, np.arange(len(contexts) + 1))
    answers = []
    for number, context in enumerate(contexts):
        rows = slice(bounds[number], bounds[number + 1])
        candidates: dict[str, tuple[float, float]] = {}
        for index in np.argsort(-totals[rows], axis=None, kind="stable"):
            row, i, j = np.unravel_index(index, totals[rows].shape)
            row += rows.start
            if totals[row, i, j] == -np.inf or len(candidates) == n_best_size:
                break
            start, end = starts[row, i], ends[row, j]
            places = windows.offsets[number][[start + shift[row], end + shift[row]]]
            text = _text(context, places[0, 0], places[1, 1])
            candidates.setdefault(text, (logits[row, 0, start], logits[row, 1, end]))
        answers.append(_with_probabilities(candidates or {"": (0.0, 0.0)}))
    return answers


def has_most_context(windows: Windows) -> np.ndarray:
    """Whether no other window shows more context around each token.

    A token in several windows is scored where the smaller of its left and right
    contexts is largest (plus a hundredth of the window, which matters for the last,
    shorter one); of equals in the first. This is the "max context" rule of
    `run_squad.py`.

    Args:
      windows: Of `cut`.

    Returns:
      bool [windows, length]; false for what is not of the context.
    """
    pandas = extras.require("pandas")
    in_context = _in_context(windows)
    rows, columns = np.nonzero(in_context)
    count = in_context.sum(axis=1)[rows]
    left = columns - in_context.argmax(axis=1)[rows]
    score = pandas.Series(np.minimum(left, count - 1 - left) + 0.01 * count)
    tokens = [windows.question[rows], windows.first[rows] + left]
    best = score.groupby(tokens).idxmax()  # Of equals the first.
    mask = np.zeros_like(in_context)
    mask[rows[best], columns[best]] = True
    return mask


def _token_span(offsets, start, answer):
    """Returns the first and the last token with a character of the answer."""
    first = np.searchsorted(offsets[:, 1], start, side="right")
    last = np.searchsorted(offsets[:, 0], start + len(answer), side="left") - 1
    return first, last  # first > last: none of its characters is in a token.


def _in_context(windows):
    """Returns which tokens are of the context: of segment 1, but for its "[SEP]"."""
    segments = windows.features["segment_ids"].astype(bool)
    return segments & np.roll(segments, -1, axis=1)


def _best(scores, allowed, count):
    """Returns places and float64 scores of the best allowed tokens of each window."""
    usable = allowed & np.isfinite(scores)
    scores = np.where(usable, scores.astype("float64"), -np.inf)
    places = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    return places, np.take_along_axis(scores, places, axis=1)


def _text(context, start, stop):
    """Returns some characters, and the accents on the last one.

    Those that the tokenizer strips are of no token.
    """
    while stop < len(context) and unicodedata.category(context[stop]) == "Mn":
        stop += 1
    return context[start:stop]


def _with_probabilities(candidates):
    """Returns answers as plain data from {text: (start, end score)}."""
    scores = np.array(list(candidates.values()), "float64")
    totals = scores.sum(axis=1)
    weights = np.exp(totals - totals.max())
    names = ("probability", "start_logit", "end_logit")
    numbers = np.column_stack([weights / weights.sum(), scores]).tolist()
    return [
        {"text": text, **dict(zip(names, row, strict=True))}
        for text, row in zip(candidates, numbers, strict=True)
    ]
