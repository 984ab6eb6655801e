"""Questions whose answers are spans of a text: SQuAD 1.1 in TFDS or JSON, CSV files."""

import json
import os
import pathlib
from typing import TYPE_CHECKING

from ml_collections import config_dict

from tfamp import errors, extras
from tfamp.recipes import data as data_sets
from tfamp.recipes.texts import text_data

if TYPE_CHECKING:
    import pandas

_COLUMNS = ("id", "title", "context", "question", "answers", "starts")


def load(config: config_dict.ConfigDict) -> text_data.Corpus:
    """Reads questions, shuffles them, and splits off what is not split yet.

    Args:
      config: `config.data` has
        name: "csv", spans of local files; else a name in TFDS, whose split "validation"
          is the test data, or "squad" for JSON files in SQuAD 1.1's format;
        train_file, test_file: the files; no test file: a share `test_fraction` of the
          training questions is held out;
        on_bad_rows: "raise", or "skip" to leave bad questions out and say how many;
        split_seed: seed of splits and order, apart from the seed of a run.
        Of "csv" also context_column, question_column, answer_column, delimiter, header,
        quoted. The first place of an answer in its context counts.
        `config.validation_fraction` is the share that selects; 0: none.
        `config.limit_examples` are the most of each split; 0: all.
        `config.data_dir` is the folder of the files, or of data prepared by TFDS;
        `config.manual_dir` that of JSON files.

    Returns:
      A `Corpus` of tables with the columns id, title ("" if it is not known), context,
      question, answers, a list of texts, and starts, a list of where in the context
      they begin. Questions on one article, or on one context where no article is named,
      are on the same side of each split that is made here.

    Raises:
      DataError: If the data are missing or malformed; bad questions are named.
    """
    data, data_dir, manual_dir = config.data, config.data_dir, config.manual_dir
    folders = [folder for folder in (manual_dir, data_dir) if folder]
    files = [name for name in (data.train_file, data.test_file) if name]
    if data.name == "csv":
        parts = [_read_csv(data, data_dir, name) for name in files]
    elif matches := [f for f in folders if os.path.isfile(os.path.join(f, files[0]))]:
        parts = [read_json(os.path.join(matches[0], name)) for name in files]
    elif manual_dir:
        raise errors.DataError(
            f"No file {files[0]} in the folder --manual_dir={manual_dir}. Pass the "
            "folder that holds it, or set config.data.train_file and test_file."
        )
    else:
        parts = _read_tfds(config)
    notes: list[str] = []
    wrong = [_problems(part) for part in parts]
    bad = [
        f"{place}: {reason}"
        for part, reasons in zip(parts, wrong, strict=True)
        for place, reason in zip(part.place, reasons, strict=True)
        if reason
    ]
    data_sets.report_bad_rows(bad, data.on_bad_rows, notes)
    parts = [part[w == ""] for part, w in zip(parts, wrong, strict=True)]
    if not all(map(len, parts)):
        sizes = " and ".join(str(len(part)) for part in parts)
        raise errors.DataError(
            f"{data.name} has {sizes} usable question(s) in its files or splits. "
            f"Expected at least 1 of each. {'; '.join(notes)}".strip()
        )
    parts = [part.assign(key=_keys(part)) for part in parts]
    return text_data.Corpus(*text_data.split(parts, config, notes), tuple(notes))


def read_json(path: str | os.PathLike) -> "pandas.DataFrame":
    """Reads a file in SQuAD 1.1's format.

    Returns:
      A table as `load` returns, in the file's order; nothing in it is checked.

    Raises:
      DataError: If the file is missing or of another format.
    """
    try:
        rows = [
            (
                entry["id"],
                article.get("title") or "",
                paragraph["context"],
                entry["question"],
                [answer["text"] for answer in entry["answers"]],
                [answer["answer_start"] for answer in entry["answers"]],
            )
            for article in json.loads(pathlib.Path(path).read_text("utf-8-sig"))["data"]
            for paragraph in article["paragraphs"]
            for entry in paragraph["qas"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise errors.DataError(
            f"{path} cannot be read as SQuAD 1.1's JSON: {reason}."
        ) from error
    return _table(rows, path)


def _table(rows, place):
    """Returns rows of `_COLUMNS`, each with where it is from."""
    pandas = extras.require("pandas")
    table = pandas.DataFrame(rows, columns=list(_COLUMNS))
    return table.assign(place=[f"{place}, question {name!r}" for name in table.id])


def _read_tfds(config):
    """Returns the tables of the splits train and validation of data like "squad"."""
    name, builder = config.data.name, data_sets.prepared_builder(config)
    names = {*builder.info.features, *builder.info.splits}
    missing = {"id", "context", "question", "answers", "train", "validation"} - names
    if missing:
        raise errors.DataError(
            f"The data set {name!r} is not of questions and answers as 'squad': it has "
            f"no {', '.join(sorted(missing))}. Found: {', '.join(sorted(names))}."
        )
    tables = []
    for split in ("train", "validation"):
        examples = builder.as_dataset(split=split, shuffle_files=False)
        rows = [
            (
                *(e[field].decode() for field in _COLUMNS[:4]),
                [text.decode() for text in e["answers"]["text"]],
                e["answers"]["answer_start"].tolist(),
            )
            for e in examples.as_numpy_iterator()
        ]
        tables.append(_table(rows, f"{name} ({split})"))
    return tables


def columns(data: config_dict.ConfigDict) -> list[str]:
    """Returns the names of the columns of contexts and questions."""
    if data.name == "csv":
        return [data.context_column, data.question_column]
    return ["context", "question"]


def _read_csv(data, folder, pattern):
    """Returns the table of a CSV file, or of all that match a pattern."""
    wanted = [*columns(data), data.answer_column]
    table = data_sets.read_files(data, folder, pattern, wanted)
    table = table.set_axis(["context", "question", "answers", "place"], axis=1)
    return table.assign(
        id=[os.path.relpath(place, folder or ".") for place in table.place],
        title="",
        answers=[[answer] for answer in table.answers],
        starts=[[c.find(a)] for c, a in zip(table.context, table.answers, strict=True)],
    )


def _problems(table):
    """Returns what is wrong with each question; "" for nothing."""
    pandas = extras.require("pandas")
    reasons = pandas.Series([_problem(row) for row in table.itertuples()], dtype=str)
    return reasons.mask(table.id.duplicated() & (reasons == ""), "its id occurs twice")


def _problem(row):
    """Returns why a question cannot be used; "" if it can."""
    if not (row.context.strip() and row.question.strip()):
        return "its context or its question is empty"
    if not row.answers:
        return "it has no answer (unanswerable questions of SQuAD 2.0 are not handled)"
    for text, start in zip(row.answers, row.starts, strict=True):
        there = row.context[start : start + len(text)] if start >= 0 else ""
        if there != text or not text.strip():
            place = f" at its answer_start {start}; there is {there!r}"
            return f"the answer {text!r} is not in the context" + place * (start >= 0)
    return ""


def _keys(table):
    """Returns what questions that must not be split share: article, else context."""
    words = table.context.str.lower().str.split().str.join(" ")
    return table.title.where(table.title != "", words)
