"""From the scores of first and last tokens to answers: n-best decoding."""

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfamp.training import windows as windows_module


class Span(NamedTuple):
    """A possible answer.

    Attributes:
      text: Of the context, as it is written there; "" if no span is possible.
      probability: Softmax of start_logit + end_logit over the n-best of the question.
      start_logit: Score of its first token.
      end_logit: Score of its last token.
    """

    text: str
    probability: float
    start_logit: float
    end_logit: float


def check_settings(n_best_size: int, max_answer_length: int) -> None:
    """Raises ValueError if no answer could be found."""
    for name, value in (
        ("n_best_size", n_best_size),
        ("max_answer_length", max_answer_length),
    ):
        if value < 1:
            raise ValueError(f"`config.data.{name}` must be >= 1. Received: {value}.")


def decode(
    logits: np.ndarray,
    windows: windows_module.Windows,
    contexts: Sequence[str],
    *,
    n_best_size: int,
    max_answer_length: int,
) -> list[list[Span]]:
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
      windows: Of `windows.cut`.
      contexts: The context of each question.
      n_best_size: Starts, ends and answers that are considered.
      max_answer_length: Most tokens of an answer.

    Returns:
      The best first: up to `n_best_size` spans of each question, one at least.

    References:
      https://github.com/google-research/bert/blob/master/run_squad.py
    """
    check_settings(n_best_size, max_answer_length)
    rows, length = windows.features["token_ids"].shape
    if logits.shape != (rows, 2, length):
        raise ValueError(
            f"`logits` must be [windows, 2, length] = {(rows, 2, length)}. Received: "
            f"{logits.shape}."
        )
    starts, ends, scores = _pairs(logits, windows, n_best_size, max_answer_length)
    bounds = np.searchsorted(windows.question, np.arange(len(contexts) + 1))
    answers = []
    for number, context in enumerate(contexts):
        rows = slice(bounds[number], bounds[number + 1])
        found: dict[str, tuple[float, float]] = {}
        for row, start, end in _ranked(starts[rows], ends[rows], scores[rows]):
            row += rows.start
            text = _text_between(windows, row, start, end, context)
            found.setdefault(text, (logits[row, 0, start], logits[row, 1, end]))
            if len(found) == n_best_size:
                break
        answers.append(_spans(found))
    return answers


def _pairs(logits, windows, n_best_size, max_answer_length):
    """Returns places [windows, n] of starts and ends, scores [windows, n, n]."""
    place = np.arange(logits.shape[2]) - windows.prefix[:, None]
    in_context = (place >= 0) & (place < windows.count[:, None])
    may_start = windows_module.has_most_context(windows)
    starts, start_scores = _best(logits[:, 0], may_start, n_best_size)
    ends, end_scores = _best(logits[:, 1], in_context, n_best_size)
    # In float64: sums of different float32 scores are not equal.
    scores = start_scores[:, :, None] + end_scores[:, None, :]
    size = ends[:, None, :] - starts[:, :, None] + 1
    return (
        starts,
        ends,
        np.where((size >= 1) & (size <= max_answer_length), scores, -np.inf),
    )


def _best(scores, allowed, count):
    """Returns places and float64 scores of the best allowed tokens of each window."""
    usable = allowed & np.isfinite(scores)
    scores = np.where(usable, scores.astype("float64"), -np.inf)
    places = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    return places, np.take_along_axis(scores, places, axis=1)


def _ranked(starts, ends, scores):
    """Yields (window, start, end) of the possible pairs, the best first."""
    flat = scores.ravel()
    possible = np.flatnonzero(flat > -np.inf)
    for index in possible[np.argsort(-flat[possible], kind="stable")]:
        row, start, end = np.unravel_index(index, scores.shape)
        yield row, starts[row, start], ends[row, end]


def _text_between(windows, row, start, end, context):
    """Returns the characters from one token's first to another's last."""
    offsets = windows.offsets[windows.question[row]]
    shift = windows.first[row] - windows.prefix[row]
    stop, limit = offsets[end + shift, 1], len(context)
    if end + shift + 1 < len(offsets):
        limit = offsets[end + shift + 1, 0]
    # Accents that the tokenizer strips are of no token, but of the last character.
    while stop < limit and unicodedata.category(context[stop]) == "Mn":
        stop += 1
    return context[offsets[start + shift, 0] : stop]


def _spans(found):
    """Returns spans with their probabilities from {text: (start, end score)}."""
    if not found:
        return [Span("", 1.0, 0.0, 0.0)]
    totals = np.array(list(found.values()), "float64").sum(axis=1)
    weights = np.exp(totals - totals.max())
    return [
        Span(text, float(weight), float(start), float(end))
        for (text, (start, end)), weight in zip(
            found.items(), weights / weights.sum(), strict=True
        )
    ]
