"""Text as windows of token ids, each token the label of the one before it."""

import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import config_dict

from tfamp import errors
from tfamp.recipes import data as data_sets
from tfamp.recipes.texts import docstrings, encoders, text_data
from tfamp.runs import default_config

_SPACE = re.compile(r"\s")


class Text(NamedTuple):
    """Windows of three splits.

    Attributes:
      windows: Dict from split to int32 [windows, sequence_length + 1]. The first
        token of a window is the last one of the window before, so that each token of
        the text is predicted once.
      vocabulary: Number of token ids, a multiple of 8.
      note: Where the text is from, and its tokens: their number, the characters of the
        test split by its tokens, that perplexities over other vocabularies can be
        compared with, and the share of its tokens that are not in the vocabulary.
      tokenizer: What ids stand for, as JSON: of the `tokenizers` library; of characters
        {"characters": [...]}, of ids from 1 on, 0 being every other one.
    """

    windows: dict[str, np.ndarray]
    vocabulary: int
    note: str
    tokenizer: str


def read(config: config_dict.ConfigDict) -> Text:
    """Reads text, splits it, and cuts it to windows.

    A test split that shares passages with the training text would measure memory: files
    of text are cut in three in their order, training first, and docstrings are dealt by
    whole source files.

    Args:
      config: `config.data` has
        name: "docstrings", with `libraries`, `texts_per_library`, `min_words` and
          `split_seed`, or "text_file", with `text_files`, a name or pattern in
          `config.data_dir`.
        unit: "wordpiece": an uncased WordPiece tokenizer is trained on the training
          split, and each line of text ends in its "[SEP]"; "character": the characters
          of the training split, line ends among them.
        sequence_length: Tokens of a window.
        test_fraction: Share of the text that is the test split.
        `config.model.vocabulary_size` is the most WordPiece tokens;
        `config.validation_fraction` the share of the rest for validation;
        `config.limit_examples` the most windows of each split.

    Raises:
      DataError: If there is no text, or too little for one window of each split.
      ValueError: If the unit or the source is unknown.
    """
    data, readers = config.data, {"docstrings": _docstrings, "text_file": _text_files}
    units: dict[str, Callable] = {"wordpiece": _wordpieces, "character": _characters}
    one_of = default_config.one_of
    rules = {"data.name": one_of([*readers]), "data.unit": one_of([*units])}
    default_config.check(config, rules)
    lines, note = readers[data.name](config)
    encode, vocabulary, unknown, tokenizer = units[data.unit](
        lines["train"], config.model.vocabulary_size
    )
    ids = {name: encode(part) for name, part in lines.items()}
    length, limit = data.sequence_length, config.limit_examples or None
    windows = {name: cut(part, length)[:limit] for name, part in ids.items()}
    if not all(map(len, windows.values())):
        sizes = ", ".join(f"{name} {len(part)}" for name, part in ids.items())
        raise errors.DataError(
            f"Too little text: a window has {length + 1} tokens. Received: {sizes} "
            "tokens. Pass more text, or lower config.data.sequence_length."
        )
    sizes = " / ".join(f"{part[:, 1:].size} {name}" for name, part in windows.items())
    characters = sum(map(len, lines["test"])) / len(ids["test"])
    return Text(
        windows,
        -(-vocabulary // 8) * 8,  # As Tensor Cores want it.
        f"{note}; {sizes} tokens ({data.unit}), {characters:.2f} test characters a "
        f"token, {np.mean(ids['test'] == unknown):.2%} unknown",
        tokenizer,
    )


def cut(ids: np.ndarray, length: int) -> np.ndarray:
    """Cuts a text to windows; what does not fill the last one is left out.

    Args:
      ids: Token ids, int32 [tokens].
      length: Tokens that a window predicts.

    Returns:
      int32 [windows, length + 1]; the last token of one is the first of the next.
    """
    starts = np.arange((len(ids) - 1) // length if len(ids) else 0)[:, None] * length
    return ids[starts + np.arange(length + 1)]


def split(text: str, validation: float, test: float) -> dict[str, str]:
    """Cuts a text in three behind white space, by characters, in its order.

    Args:
      text: The text.
      validation: Share of what is not the test split; 0: there is none.
      test: Share of the test split, the end of the text.

    Returns:
      Dict from split to its text.
    """
    places = []
    for share in ((1.0 - test) * (1.0 - validation), 1.0 - test):
        place = int(share * len(text))
        space = _SPACE.search(text, max(place - 1, 0))  # None: a text without spaces.
        places.append(space.end() if space else place)
    first, second = places
    if not validation:
        return {"train": text[:second], "test": text[second:]}
    return {
        "train": text[:first],
        "validation": text[first:second],
        "test": text[second:],
    }


def _text_files(config):
    """Returns the lines of each split, and a note on the files."""
    data, texts = config.data, []
    paths = data_sets.find_files(config.data_dir, data.text_files)
    for path in paths:
        try:
            texts.append(pathlib.Path(path).read_text("utf-8-sig").rstrip("\n"))
        except (OSError, UnicodeDecodeError) as error:
            raise errors.DataError(f"Cannot read {path}: {error}.") from error
    text = "\n".join(texts)
    parts = split(text, config.validation_fraction, data.test_fraction)
    lines = {name: part.removesuffix("\n").split("\n") for name, part in parts.items()}
    if data.unit == "wordpiece":  # It knows no blank ones.
        lines = {name: list(filter(str.strip, part)) for name, part in lines.items()}
    return lines, f"{len(paths)} file(s) {data.text_files}, {len(text)} characters"


def _docstrings(config):
    """Returns the texts of each split, and a note; a file's are all in one split."""
    data = config.data
    table = docstrings.collect(data.libraries, data.texts_per_library, data.min_words)
    train, test = text_data.hold_out(
        table.assign(key=table.file), data.test_fraction, data.split_seed
    )
    parts = {}
    if config.validation_fraction:
        train, parts["validation"] = text_data.hold_out(
            train, config.validation_fraction, data.split_seed + 1
        )
    parts = {"train": train, **parts, "test": test}
    note = f"{len(table)} docstrings of {docstrings.versions(data.libraries)}"
    return {name: list(part.text) for name, part in parts.items()}, note


def _wordpieces(lines: Sequence[str], most: int):
    """Returns what makes ids of lines, their number, the unknown one, and the JSON."""
    tokenizer = encoders.train_tokenizer(lines, most)

    def encode(lines):
        # Without "[CLS]"; each ends in "[SEP]".
        ids = [each.ids[1:] for each in encoders.encodings(tokenizer, lines)]
        return np.concatenate([np.zeros(0, "int32"), *ids]).astype("int32")

    unknown, size = tokenizer.token_to_id("[UNK]"), tokenizer.get_vocab_size()
    return encode, size, unknown, tokenizer.to_str(pretty=True)


def _characters(lines: Sequence[str], most: int):
    """Does the same for characters; 0 is what the training split does not have."""
    del most  # There are as many as there are.
    characters = sorted({"\n"}.union(*lines))
    ids = {character: place for place, character in enumerate(characters, 1)}

    def encode(lines):
        return np.array([ids.get(c, 0) for line in lines for c in f"{line}\n"], "int32")

    return encode, len(ids) + 1, 0, json.dumps({"characters": characters})
