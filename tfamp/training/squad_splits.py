"""Questions from TFDS or CSV files, in reproducible splits."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from ml_collections import config_dict

from tfamp import errors
from tfamp.training import data, squad, tables, text

_FEATURES = {"id", "context", "question", "answers"}  # Of a TFDS data set.


class Splits(NamedTuple):
    """Questions of three splits, each in a fixed, shuffled order.

    Attributes:
      train: Questions to train on.
      validation: Questions split off the training data; they select the checkpoint.
        Empty for a share of 0.
      test: Questions scored once.
      notes: What was left out and why, for the report; never silently.
    """

    train: list[squad.Question]
    validation: list[squad.Question]
    test: list[squad.Question]
    notes: tuple[str, ...]


def load(
    config: config_dict.ConfigDict, data_dir: str | None, manual_dir: str | None
) -> Splits:
    """Reads and checks the questions; nothing malformed gets to the tokenizer.

    Args:
      config: `config.data` has
        name: "csv", see `load_csv`; or a TFDS name, see `load_tfds`.
        on_bad_rows: "raise", or "skip" to leave bad questions out and say how many.
        split_seed: Seed of splits and order, apart from the seed of a run.
        `config.validation_fraction` is the share of the training questions that is
        held out; 0 for none. `config.limit_examples`: first so many of each split.
      data_dir: Folder of the CSV files, or of data prepared by TFDS.
      manual_dir: Folder with a TFDS data set's original files.

    Returns:
      `Splits`. Questions on one article, or on one context where no article is
      named, are on the same side of each split that is made here.

    Raises:
      DataError: If the data are missing or malformed, naming the question.
    """
    is_csv = config.data.name == "csv"
    if is_csv:
        train, test, problems = load_csv(config, data_dir)
    else:
        train, test, problems = load_tfds(config, data_dir, manual_dir)
    squad.settle(problems, config.data.on_bad_rows)
    if not train or not (test or is_csv):
        raise errors.DataError(
            f"{config.data.name} has {len(train)} usable training and {len(test)} test "
            f"question(s). {squad.list_problems(problems)}".strip()
        )
    notes = (f"{len(problems)} bad question(s) skipped",) if problems else ()
    seed = config.data.split_seed
    if is_csv and not config.data.test_file:
        train, test = hold_out(train, config.data.test_fraction, seed)
    # Before a part of `train` selects the checkpoint, which must not know the test.
    shared = _contexts(train) & _contexts(test)
    if shared:
        notes += (f"{len(shared)} context(s) are in both training and test data",)
    validation: list[squad.Question] = []
    if config.validation_fraction:
        train, validation = hold_out(train, config.validation_fraction, seed + 1)
    count = config.limit_examples or None
    splits = (shuffle(part, seed)[:count] for part in (train, validation, test))
    return Splits(*splits, notes)


def load_tfds(
    config: config_dict.ConfigDict, data_dir: str | None, manual_dir: str | None
) -> tuple[list[squad.Question], list[squad.Question], list[str]]:
    """Reads the splits train and validation of TFDS' "squad", or of data like it.

    Args:
      config: `config.data.name` is the name. The features are those of "squad": id,
        context, question, answers {text, answer_start}, and maybe title.
      data_dir: As in `load`.
      manual_dir: As in `load`.

    Returns:
      (questions of "train", questions of "validation", a line for each bad one).

    Raises:
      DataError: If the data are not there, or of other features or splits.
    """
    name = config.data.name
    builder = data.prepared_builder(name, data_dir, manual_dir)
    splits = sorted(builder.info.splits)
    features = sorted(builder.info.features)
    if not {"train", "validation"} <= set(splits) or not _FEATURES <= set(features):
        raise errors.DataError(
            f"Data set {name!r} is not one of questions and answers. Expected splits "
            f"train and validation, features {', '.join(sorted(_FEATURES))}. "
            f"Received: splits {', '.join(splits)}, features {', '.join(features)}."
        )
    _check_kinds(builder)
    train, bad = _read_split(builder, "train", name)
    test, more = _read_split(builder, "validation", name)
    return train, test, bad + more


def load_csv(
    config: config_dict.ConfigDict, data_dir: str | None
) -> tuple[list[squad.Question], list[squad.Question], list[str]]:
    """Reads spans from CSV or TSV files, such as tweets and their `selected_text`.

    The files do not tell where the answer starts: its first place in the context
    counts. Contexts and answers are read without the spaces around them.

    Args:
      config: `config.data` has train_file, test_file ("": none) and what else
        `tables.read_table` reads; context_column, question_column, answer_column.
      data_dir: Folder of the files.

    Returns:
      (questions of the training file, of the test file, a line for each bad row).

    Raises:
      DataError: If a file or a column is missing, or no row is usable.
    """
    train, bad = _read_rows(config, data_dir, config.data.train_file)
    test: list[squad.Question] = []
    if config.data.test_file:
        test, more = _read_rows(config, data_dir, config.data.test_file)
        bad += more
    return train, test, bad


def hold_out(
    questions: Sequence[squad.Question], fraction: float, seed: int
) -> tuple[list[squad.Question], list[squad.Question]]:
    """Splits off whole articles, or whole contexts where no article is named.

    Args:
      questions: Questions in any order; the result does not depend on it.
      fraction: Share in (0, 1) of the questions that is held out: no more, unless the
        smallest article is larger.
      seed: Seed of the choice.

    Returns:
      The larger part and the held-out part, neither of them empty.

    Raises:
      ValueError: If `fraction` is not in (0, 1).
      DataError: If all questions are on one article.
    """
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"A held-out share must be in (0, 1). Received: {fraction}.")
    groups: dict[str, list[squad.Question]] = {}
    for question in sorted(questions):
        groups.setdefault(_group(question), []).append(question)
    if len(groups) < 2:
        raise errors.DataError(
            f"{len(questions)} question(s) on {len(groups)} article(s) cannot be "
            "split. Expected 2 articles (contexts, where no article is named) or more."
        )
    names = sorted(groups)
    order = [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
    room = min(round(fraction * len(questions)), len(questions) - 1)
    held: list[squad.Question] = []
    for name in order:
        if len(held) + len(groups[name]) <= room:
            held += groups.pop(name)
    if not held:
        held = groups.pop(min(order, key=lambda name: len(groups[name])))
    return [q for name in order for q in groups.get(name, ())], held


def shuffle(questions: Sequence[squad.Question], seed: int) -> list[squad.Question]:
    """Returns the questions in an order that depends on them and the seed only."""
    ordered = sorted(questions)
    order = np.random.default_rng(seed).permutation(len(ordered))
    return [ordered[index] for index in order]


def _group(question):
    """Returns what questions that must not be split share."""
    return question.title or text.text_key(question.context)


def _contexts(questions):
    return {text.text_key(context) for context in {q.context for q in questions}}


def _read_split(builder, split, name):
    """Returns (questions, lines on bad ones) of a split of TFDS data."""
    examples = builder.as_dataset(split=split, shuffle_files=False)
    place = f"{name} ({split})"
    questions = []
    for number, example in enumerate(examples.as_numpy_iterator(), start=1):
        try:
            questions.append(_from_example(example))
        except UnicodeDecodeError as error:
            raise errors.DataError(f"{place}, row {number}: {error}.") from error
    return squad.check(questions, place)


def _check_kinds(builder):
    """Raises unless the features are strings, and answers have texts and places."""
    features = builder.info.features
    strings = {"id", "context", "question", "title"} & set(features)
    wrong = [name for name in sorted(strings) if not data.is_text(features[name])]
    shape, dtype = features["answers"].shape, features["answers"].tf_dtype
    if not (
        isinstance(shape, dict)
        and [len(shape.get(name) or ()) for name in ("text", "answer_start")] == [1, 1]
        and dtype["text"] == tf.string
        and dtype["answer_start"].is_integer
    ):
        wrong.append("answers")
    if wrong:
        raise errors.DataError(
            f"{builder.info.full_name} is not as 'squad': id, title, context, question "
            "are strings, answers have lists of text and of answer_start. Received: "
            f"{wrong[0]}: {data.describe_feature(features[wrong[0]])}."
        )


def _from_example(features):
    """Returns the question of a TFDS example."""
    answers = features["answers"]
    pairs = zip(answers["text"], answers["answer_start"], strict=True)
    names = ("id", "title", "context", "question")
    strings = (features.get(name, b"").decode() for name in names)
    found = tuple(squad.Answer(words.decode(), int(start)) for words, start in pairs)
    return squad.Question(*strings, found)


def _read_rows(config, data_dir, pattern):
    """Returns (questions, lines on bad rows) of one file or pattern."""
    wanted = config.data
    columns = (wanted.context_column, wanted.question_column, wanted.answer_column)
    records, bad_rows = tables.read_table(config, data_dir, pattern, columns)
    bad = [f"{b.file}, row {b.number}: {b.reason}" for b in bad_rows]
    questions = []
    for file, number, (context, question, answer) in records:
        start = context.find(answer)
        if start < 0:
            bad.append(
                f"{file}, row {number}: {columns[2]} {answer!r} is not in {columns[0]} "
                f"{context[:80]!r}"
            )
            continue
        name = f"{os.path.relpath(file, data_dir)}:{number}"
        answers = (squad.Answer(answer, start),)
        questions.append(squad.Question(name, "", context, question, answers))
    return questions, bad
