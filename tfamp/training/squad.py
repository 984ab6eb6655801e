"""Questions whose answers are spans of a text, as in SQuAD 1.1."""

import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tfamp import errors
from tfamp.training import tables

_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON may have them, UTF-8 may not.


class Answer(NamedTuple):
    """A span of a context; `start` is its first character."""

    text: str
    start: int


class Question(NamedTuple):
    """A question, the text that it is about, and its answers.

    Attributes:
      id: Names the question in predictions.
      title: Of the article that the context is from; "" if it is not known.
      context: The text that the answers are spans of.
      question: The question; of a tweet its sentiment.
      answers: One for training; several people's for scoring.
    """

    id: str
    title: str
    context: str
    question: str
    answers: tuple[Answer, ...]


def read_json(path: str | os.PathLike) -> list[Question]:
    """Reads a file in SQuAD 1.1's format.

    Args:
      path: The file.

    Returns:
      The questions, in the file's order.

    Raises:
      DataError: If the file is missing or of another format, or an entry is
        malformed: no answer, an answer that is not at its start, an id twice.
    """
    questions, problems = parse_json(path)
    settle(problems, "raise")
    return questions


def read_answers(path: str | os.PathLike) -> list[Question]:
    """Reads questions for scoring, which has no use for places in the context.

    Args:
      path: The file, in SQuAD 1.1's format.

    Returns:
      The questions; their answers need not be where they say.

    Raises:
      DataError: If the file is missing or of another format.
    """
    questions, problems = _parse(path)
    settle(problems, "raise")
    if not questions:
        raise errors.DataError(f"{path} has no question.")
    return questions


def parse_json(path: str | os.PathLike) -> tuple[list[Question], list[str]]:
    """Reads a file in SQuAD 1.1's format, bad questions apart.

    Args:
      path: The file.

    Returns:
      (usable questions, a line for each other one).

    Raises:
      DataError: If the file is missing or of another format.
    """
    found, problems = _parse(path)
    good, bad = check(found, str(path))
    if not good:
        raise errors.DataError(
            f"{path} has no usable question. {list_problems(problems + bad)}".strip()
        )
    return good, problems + bad


def check(
    questions: Iterable[Question], source: str
) -> tuple[list[Question], list[str]]:
    """Separates usable questions from others.

    Args:
      questions: Questions of one split.
      source: Where they are from, for the lines on bad ones.

    Returns:
      (usable questions, a line for each other one with its id and what is wrong).
    """
    good, bad, seen = [], [], set()
    for question in questions:
        reason = _what_is_wrong(question)
        if question.id in seen:
            reason = "its id occurs twice"
        seen.add(question.id)
        if reason:
            bad.append(f"{source}, question {question.id!r}: {reason}")
        else:
            good.append(question)
    return good, bad


def example(question: Question) -> dict[str, Any]:
    """Returns a question as the feature dictionary of TFDS' "squad"."""
    return {
        "id": question.id,
        "title": question.title,
        "context": question.context,
        "question": question.question,
        "answers": {
            "text": [answer.text for answer in question.answers],
            "answer_start": [answer.start for answer in question.answers],
        },
    }


def _what_is_wrong(question):
    """Returns why a question cannot be used; "" if it can."""
    for name in ("id", "context", "question"):
        if not getattr(question, name).strip():
            return f"its {name} is empty"
    for name in ("id", "title", "context", "question"):
        if _SURROGATE.search(getattr(question, name)):
            return f"its {name} has half of a surrogate pair (\\ud800 to \\udfff)"
    if not question.answers:
        return "it has no answer (unanswerable questions of SQuAD 2.0 are not handled)"
    for answer in question.answers:
        if not answer.text.strip():
            return f"an answer is empty: {answer.text!r}"
        end = answer.start + len(answer.text)
        there = question.context[max(answer.start, 0) : max(end, 0)]
        if there != answer.text:
            return (
                f"the answer {answer.text!r} is not at its answer_start "
                f"{answer.start}; there is {there!r}"
            )
    return ""


def settle(problems: Sequence[str], on_bad_rows: str) -> None:
    """Raises for bad questions unless they are to be skipped.

    Args:
      problems: A line for each of them.
      on_bad_rows: "raise" or "skip".

    Raises:
      DataError: If there are any, for "raise".
      ValueError: If `on_bad_rows` is neither.
    """
    tables.handle_bad_rows((), on_bad_rows)  # Only what the setting may be.
    if problems and on_bad_rows == "raise":
        raise errors.DataError(
            f"{list_problems(problems)} Correct the file, or leave such questions out "
            "with config.data.on_bad_rows='skip'."
        )


def list_problems(problems: Sequence[str]) -> str:
    """Returns one line on up to five bad questions; "" for none."""
    if not problems:
        return ""
    return f"{len(problems)} bad question(s). {tables.list_lines(problems)}."


def _parse(path) -> tuple[list[Question], list[str]]:
    """Returns a file's questions, and lines on entries that are none."""
    found: list[Question] = []
    problems: list[str] = []
    for place, title, context, entry in _entries(path, _articles(path)):
        try:
            found.append(_from_entry(place, title, context, entry))
        except errors.DataError as error:
            problems.append(str(error))
    return found, problems


def _articles(path):
    """Returns the list under "data" of a SQuAD file."""
    try:
        content = pathlib.Path(path).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise errors.DataError(f"Cannot read {path}: {error}.") from error
    if not content.strip():
        raise errors.DataError(f"{path} is empty. Expected SQuAD 1.1's JSON.")
    try:
        found = json.loads(content)
    except ValueError as error:
        raise errors.DataError(f"{path} is not valid JSON: {error}.") from error
    return _field(found, "data", list, str(path))


def _entries(path, articles) -> Iterator[tuple[str, str, str, Any]]:
    """Yields (place, title, context, entry) for each question of a SQuAD file."""
    for a, article in enumerate(articles, 1):
        place = f"{path}, article {a}"
        for p, paragraph in enumerate(_field(article, "paragraphs", list, place), 1):
            place = f"{path}, article {a}, paragraph {p}"
            context = _field(paragraph, "context", str, place)
            for q, entry in enumerate(_field(paragraph, "qas", list, place), 1):
                title = article.get("title")
                title = title if isinstance(title, str) else ""
                yield f"{place}, question {q}", title, context, entry


def _from_entry(place, title, context, entry):
    """Returns the question of an entry under "qas"."""
    name = _field(entry, "id", str, place)
    place = f"{place} ({name!r})"
    answers = tuple(
        Answer(
            _field(answer, "text", str, place),
            _field(answer, "answer_start", int, place),
        )
        for answer in _field(entry, "answers", list, place)
    )
    return Question(
        name, title, context, _field(entry, "question", str, place), answers
    )


def _field(item, name, kind, place):
    """Returns a field of a JSON object, which must be of the type `kind`."""
    value = item.get(name) if isinstance(item, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise errors.DataError(
            f"{place}: {name!r} is missing or not of type {kind.__name__}. Expected "
            f"SQuAD 1.1's JSON. Received: {str(item)[:60]!r}"
        )
    return value
