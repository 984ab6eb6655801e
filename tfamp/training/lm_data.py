"""Text as windows of token ids, each token the label of the one before it."""

import collections
import json
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import config_dict

from tfamp import errors
from tfamp.training import docstrings, tables, tokens

UNITS = ("wordpiece", "character")
SOURCES = ("docstrings", "text_file")
SPLITS = ("train", "validation", "test")
_CHUNK = 10_000  # Lines at a time: the tokenizer's objects are 100 times the ids.


_LONGEST = 1000  # Characters of a line.
_PIECE = re.compile(rf".{{1,{_LONGEST}}}(?:\s+|$)|.{{1,{_LONGEST}}}", re.DOTALL)


class Text(NamedTuple):
    """Windows of three splits.

    Attributes:
      windows: Dict from split to int32 [windows, sequence_length + 1]. The first
        token of a window is the last one of the window before, so that each token of
        the text is predicted once.
      vocabulary: Number of token ids, a multiple of 8.
      characters_per_token: Characters of the test split's text by its tokens, that
        perplexities over other vocabularies can be compared with.
      unknown: Share of the test split's tokens that are not in the vocabulary.
      note: Where the text is from.
      tokenizer: What ids stand for, as JSON: of the `tokenizers` library; of characters
        {"characters": [...]}, of ids from 1 on, 0 being every other one.
    """

    windows: dict[str, np.ndarray]
    vocabulary: int
    characters_per_token: float
    unknown: float
    note: str
    tokenizer: str


class _Vocabulary(NamedTuple):
    """encode: lines to an int32 array of ids. unknown: the id of what is not in it.

    text: as `Text.tokenizer`.
    """

    encode: Callable[[Sequence[str]], np.ndarray]
    size: int
    unknown: int
    text: str


def check(config: config_dict.ConfigDict) -> None:
    """Raises ValueError, before any text is read, if a setting makes no sense."""
    if config.data.unit not in UNITS:
        raise ValueError(
            f"Unknown unit of text. Received: config.data.unit={config.data.unit!r}. "
            f"Expected one of {UNITS}."
        )
    if config.data.name not in SOURCES:
        raise ValueError(
            f"Unknown source of text. Received: config.data.name={config.data.name!r}. "
            f"Expected one of {SOURCES}."
        )


def load(config: config_dict.ConfigDict, data_dir: str | None) -> Text:
    """Reads text, splits it, and cuts it to windows.

    A test split that shares passages with the training text would measure memory: files
    of text are cut in three in their order, training first, and docstrings are dealt by
    whole source files.

    Args:
      config: `config.data` has
        name: "docstrings", with the fields of `docstrings.load_documents`, or
          "text_file", with `text_files`, a name or pattern in `data_dir`.
        unit: "wordpiece": an uncased WordPiece tokenizer is trained on the training
          split, and each line of text ends in its "[SEP]"; "character": the characters
          of the training split, line ends among them.
        sequence_length: Tokens of a window.
        test_fraction: Share of the text that is the test split.
        `config.model.vocabulary_size` is the most WordPiece tokens;
        `config.validation_fraction` the share of the rest for validation;
        `config.limit_examples` the most windows of each split.
      data_dir: Folder of the text files.

    Returns:
      A `Text`.

    Raises:
      DataError: If there is no text, or too little for one window of each split.
      ValueError: If a setting makes no sense.
    """
    check(config)
    if config.data.name == "docstrings":
        lines = docstrings.load_documents(config)
        note = docstrings.describe(config.data.libraries)
    else:
        lines, note = _read_files(config, data_dir)
    if config.data.unit == "character":
        vocabulary = _learn_characters(lines["train"])
    else:
        vocabulary = _learn_wordpieces(lines["train"], config.model.vocabulary_size)
    ids = {name: vocabulary.encode(lines[name]) for name in SPLITS}
    wanted = [name for name in SPLITS if name != "validation" or _selects(config)]
    length, limit = config.data.sequence_length, config.limit_examples or None
    windows = {name: cut(ids[name], length)[:limit] for name in wanted}
    _check_windows(windows, ids, length)
    return Text(
        windows=windows,
        vocabulary=tokens.round_up(vocabulary.size),
        characters_per_token=sum(map(len, lines["test"])) / len(ids["test"]),
        unknown=float(np.mean(ids["test"] == vocabulary.unknown)),
        note=note,
        tokenizer=vocabulary.text,
    )


def _selects(config):
    return config.validation_fraction > 0


def cut(ids: np.ndarray, length: int) -> np.ndarray:
    """Cuts a text to windows; what does not fill the last one is left out.

    Args:
      ids: Token ids, int32 [tokens].
      length: Tokens that a window predicts.

    Returns:
      int32 [windows, length + 1]; the last token of one is the first of the next.
    """
    count = max(len(ids) - 1, 0) // length
    starts = np.arange(count)[:, None] * length
    return ids[starts + np.arange(length + 1)]


def split_lines(
    lines: Sequence[str], validation: float, test: float
) -> dict[str, list[str]]:
    """Cuts a text in three at line ends, by characters, in its order.

    Args:
      lines: Lines of the text.
      validation: Share of what is not the test split.
      test: Share of the test split, the end of the text.

    Returns:
      Dict from split to its lines.
    """
    ends = np.cumsum([len(line) + 1 for line in lines])
    total = ends[-1] if len(ends) else 0
    places = total * (1.0 - test) * np.array([1.0 - validation, 1.0])
    first, second = np.searchsorted(ends, places, side="right")
    parts = lines[:first], lines[first:second], lines[second:]
    return {name: list(part) for name, part in zip(SPLITS, parts, strict=True)}


def _read_files(config, data_dir):
    """Returns the lines of each split, and a note on the files."""
    data = config.data
    paths = tables.find_files(data_dir, data.text_files, data)
    text = "\n".join(tables.read_text(path).rstrip("\n") for path in paths)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    lines = [part.rstrip() for line in text.split("\n") for part in _pieces(line)]
    if data.unit == "wordpiece":
        lines = [line for line in lines if line]  # It knows no blank ones.
    parts = split_lines(lines, config.validation_fraction, data.test_fraction)
    note = f"{len(paths)} file(s) {data.text_files}, {len(text)} characters"
    return parts, note


def _pieces(line):
    """Cuts what is longer than a line at spaces: some texts have no line ends."""
    return _PIECE.findall(line) if len(line) > _LONGEST else [line]


def _learn_wordpieces(lines, size):
    tokenizer = tokens.train(lines, size)

    def encode(lines):
        starts = range(0, len(lines), _CHUNK)
        found = (tokenizer.encode_batch(lines[at : at + _CHUNK]) for at in starts)
        # Without "[CLS]"; each ends in "[SEP]".
        ids = [each.ids[1:] for encodings in found for each in encodings]
        return np.concatenate([np.zeros(0, "int32"), *ids]).astype("int32")

    unknown = tokenizer.token_to_id("[UNK]")
    size = tokenizer.get_vocab_size()
    return _Vocabulary(encode, size, unknown, tokenizer.to_str(pretty=True))


def _learn_characters(lines):
    """Ids by frequency; 0 is what the training split does not have."""
    counts = collections.Counter("\n".join(lines) + "\n")
    order = sorted(counts, key=lambda c: (-counts[c], c))
    ids = {character: place for place, character in enumerate(order, 1)}

    def encode(lines):
        text = "".join(f"{line}\n" for line in lines)
        return np.array([ids.get(c, 0) for c in text], "int32")

    return _Vocabulary(encode, len(ids) + 1, 0, json.dumps({"characters": order}))


def _check_windows(windows, ids, length):
    empty = [name for name, found in windows.items() if not len(found)]
    if empty:
        sizes = ", ".join(f"{name} {len(ids[name])}" for name in windows)
        raise errors.DataError(
            f"Too little text for the {' and '.join(empty)} split: a window has "
            f"{length + 1} tokens. Received: {sizes} tokens. Pass more text, or lower "
            "config.data.sequence_length."
        )
