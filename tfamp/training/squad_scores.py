"""Exact match, F1 and Jaccard of spans, as SQuAD 1.1 and Kaggle score them."""

import collections
import json
import os
import pathlib
import re
import statistics
import string
from collections.abc import Callable, Mapping, Sequence

from tfamp import errors
from tfamp.training import squad

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(answer: str) -> str:
    """Returns an answer in lower case, without punctuation, articles, extra spaces."""
    plain = answer.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def exact_match(prediction: str, gold: str) -> float:
    """Returns 1 if two answers are the same once normalized, else 0."""
    return float(normalize(prediction) == normalize(gold))


def f1(prediction: str, gold: str) -> float:
    """Returns the F1 of the words of two normalized answers.

    As in the official script of SQuAD 1.1, answers without a common word score 0, two
    without any word too.
    """
    predicted, expected = (normalize(text).split() for text in (prediction, gold))
    counts = collections.Counter(predicted) & collections.Counter(expected)
    common = counts.total()
    # The harmonic mean of common / predicted and common / expected.
    return 2 * common / (len(predicted) + len(expected)) if common else 0.0


def jaccard(prediction: str, gold: str) -> float:
    """Returns the share of common words in all words, in lower case.

    The score of Kaggle's "Tweet Sentiment Extraction": words are what spaces separate,
    punctuation included, and a word counts once. Two empty texts score 1.
    """
    predicted, expected = (set(text.lower().split()) for text in (prediction, gold))
    words = predicted | expected
    return len(predicted & expected) / len(words) if words else 1.0


METRICS: dict[str, Callable[[str, str], float]] = {
    "f1": f1,
    "exact_match": exact_match,
    "jaccard": jaccard,
}


def score(
    questions: Sequence[squad.Question],
    predictions: Mapping[str, str],
    names: Sequence[str] = ("f1", "exact_match"),
) -> dict[str, float]:
    """Scores predictions: the best over a question's answers, the mean over questions.

    Args:
      questions: Questions with answers.
      predictions: Question id -> text. A question without one scores 0; predictions
        for other questions do not count.
      names: Keys of `METRICS`.

    Returns:
      Fractions in [0, 1] by name.

    Raises:
      ValueError: If there is no question.
    """
    if not questions:
        raise ValueError("There is no question to score. Received: 0 questions.")
    return {
        name: statistics.fmean(
            _best(METRICS[name], predictions.get(question.id), question.answers)
            for question in questions
        )
        for name in names
    }


def score_file(
    questions_file: str | os.PathLike, predictions_file: str | os.PathLike
) -> dict[str, float]:
    """Scores a predictions JSON against questions in SQuAD 1.1's format.

    Args:
      questions_file: Path of the questions, see `squad.read_answers`.
      predictions_file: Path of a JSON object {question id: text}.

    Returns:
      {"f1", "exact_match"}, fractions in [0, 1].

    Raises:
      DataError: If a file is missing or malformed.
    """
    questions = squad.read_answers(questions_file)
    return score(questions, _read_predictions(predictions_file))


def _best(metric, prediction, answers):
    """Returns the largest score over the answers; 0 without a prediction."""
    if prediction is None:
        return 0.0
    return max((metric(prediction, answer.text) for answer in answers), default=0.0)


def _read_predictions(path):
    """Reads {question id: text}."""
    try:
        found = json.loads(pathlib.Path(path).read_text("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise errors.DataError(f"Cannot read {path} as JSON: {error}.") from error
    if not isinstance(found, dict) or not all(
        isinstance(t, str) for t in found.values()
    ):
        raise errors.DataError(
            f"{path} must hold a JSON object {{question id: text}}. Received: "
            f"{str(found)[:60]!r}"
        )
    return found
