"""Text to windows: nothing lost or seen twice, splits in order, errors in one line."""

import json
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tfamp import errors
from tfamp.training import docstrings, lm_config, lm_data

TEXT = "".join(f"line {number} of the text, no {number % 7}\n" for number in range(400))


@pytest.fixture
def config():
    config = lm_config.get_text_file_config()
    config.data.unit = "character"
    config.data.sequence_length = 10
    return config


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return str(folder)


@given(st.integers(0, 60), st.integers(1, 9))
def test_windows_predict_each_token_once(tokens, length):
    windows = lm_data.cut(np.arange(tokens, dtype="int32"), length)
    predicted = windows[:, 1:].reshape(-1)
    assert predicted.tolist() == list(range(1, len(predicted) + 1))
    assert tokens - 1 - len(predicted) < length
    np.testing.assert_array_equal(windows[:, :-1].reshape(-1), predicted - 1)


@given(st.lists(st.text(max_size=9), max_size=30), st.floats(0, 0.5))
def test_lines_are_split_in_their_order(lines, validation):
    parts = lm_data.split_lines(lines, validation, 0.25)
    assert sum(parts.values(), []) == lines
    held = sum(len(line) + 1 for line in parts["test"])
    longest = max((len(line) + 1 for line in lines), default=0)
    assert abs(held - 0.25 * sum(len(line) + 1 for line in lines)) <= longest
    if not validation:
        assert parts["validation"] == [] or held <= longest


def test_characters_of_a_file_come_back(config, tmp_path):
    text = lm_data.load(config, write(tmp_path, a=TEXT))
    whole = [text.windows[name] for name in lm_data.SPLITS]
    train = "\n".join(lm_data.split_lines(TEXT.split("\n"), 0.05, 0.05)["train"])
    train += "\n"
    alphabet = sorted(set(train), key=lambda c: (-train.count(c), c))
    read = "".join(alphabet[i - 1] for part in whole for i in part[:, 1:].reshape(-1))
    assert read[:3000] == TEXT[1:3001]  # The first token is not predicted.
    assert text.vocabulary == 8 * -(-(len(alphabet) + 1) // 8)
    assert (text.characters_per_token, text.unknown) == (pytest.approx(1, abs=0.05), 0)


def test_files_are_read_in_the_order_of_their_names(config, tmp_path):
    half = len(TEXT) // 2
    data_dir = write(tmp_path, b=TEXT[half:], a=TEXT[:half].rstrip("\n"))
    (tmp_path / "c.md").write_text("not this one")
    two = lm_data.load(config, data_dir)
    assert "2 file(s)" in two.note
    text = "".join(TEXT[:half].rstrip("\n") + "\n" + TEXT[half:])
    (tmp_path / "whole").mkdir()
    one = lm_data.load(config, write(tmp_path / "whole", whole=text))
    for name in lm_data.SPLITS:
        np.testing.assert_array_equal(one.windows[name], two.windows[name])


def test_vocabulary_is_of_the_training_split(config, tmp_path):
    last = TEXT + "\u00e9" * 30 + "\n"
    text = lm_data.load(config, write(tmp_path, a=last))
    assert 0 < text.unknown < 0.1
    assert (text.windows["test"] == 0).any() and not (text.windows["train"] == 0).any()


def test_word_pieces_end_each_line(config, tmp_path):
    config.data.unit = "wordpiece"
    config.model.vocabulary_size = 101
    text = lm_data.load(config, write(tmp_path, a=TEXT.replace("\n", "\n\n")))
    assert text.vocabulary == 104 or text.vocabulary % 8 == 0
    train = np.append(text.windows["train"][:, :-1].reshape(-1), 0)
    ends = np.flatnonzero(train == 3)  # "[SEP]"
    assert 340 < len(ends) < 370 and 0 < np.diff(ends).max() < 30
    assert not np.isin(train[:-1], (0, 2)).any()  # Neither "[PAD]" nor "[CLS]".
    assert text.characters_per_token > 1.5


def test_limit_is_of_windows_and_nothing_is_split_off_for_no_validation(
    config, tmp_path
):
    config.limit_examples = 7
    config.validation_fraction = 0.0
    text = lm_data.load(config, write(tmp_path, a=TEXT))
    assert {name: each.shape for name, each in text.windows.items()} == {
        "train": (7, 11),
        "test": (7, 11),
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"caf\xe9 au lait\n", "line 1: the byte 0xe9 is not UTF-8"),
        (b"", "Too little text for the train"),
        (b"short\n", "Too little text"),
    ],
)
def test_unusable_file_is_refused(config, tmp_path, content, message):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(errors.DataError, match=message) as raised:
        lm_data.load(config, str(tmp_path))
    assert "\n" not in str(raised.value)


def test_missing_folder_or_file_is_refused(config, tmp_path):
    with pytest.raises(errors.DataError, match="--data_dir"):
        lm_data.load(config, None)
    with pytest.raises(errors.DataError, match=r"\*.txt.*config.data.text_files"):
        lm_data.load(config, str(tmp_path))


@pytest.mark.parametrize("unit", ["character", "wordpiece"])
def test_text_without_line_ends_is_cut_at_spaces(config, tmp_path, unit):
    config.data.unit = unit
    words = " ".join(f"word{number % 7}" for number in range(20_000))
    write(tmp_path, **{"a": words + "\rlast line"})
    found = lm_data.load(config, str(tmp_path))
    assert all(len(windows) for windows in found.windows.values())
    longest = max(map(len, lm_data._pieces(words)))
    assert longest <= 1001 and "".join(lm_data._pieces(words)) == words


def test_tokenizer_tells_what_ids_stand_for(config, tmp_path):
    config.data.unit = "character"
    write(tmp_path, **{"a": "abcab\n" * 50})
    found = lm_data.load(config, str(tmp_path))
    names = ["?", *json.loads(found.tokenizer)["characters"]]
    text = "".join(names[i] for i in found.windows["train"][:, :-1].ravel())
    assert ("abcab\n" * 50).startswith(text) and len(text) > 10
    config.data.unit, config.data.sequence_length = "wordpiece", 1
    pieces = tokenizers.Tokenizer.from_str(
        lm_data.load(config, str(tmp_path)).tokenizer
    )
    assert "abcab" in pieces.decode(pieces.encode("abcab abcab").ids)


@pytest.mark.parametrize(("field", "value"), [("unit", "word"), ("name", "wikitext")])
def test_unknown_settings_are_refused(config, field, value):
    config.data[field] = value
    with pytest.raises(ValueError, match=f"config.data.{field}='{value}'"):
        lm_data.load(config, None)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of twenty modules; each has two docstrings of its own."""
    folder = tmp_path / "lorem"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    for index in range(20):
        word = chr(ord("a") + index) * 4
        texts = [
            " ".join(f"{word}{mark}{each}x" for each in "abcdefghi") for mark in "yz"
        ]
        texts[1] += " of NumPy arrays"
        code = "".join(f'def f{n}():\n    """{t}"""\n' for n, t in enumerate(texts))
        (folder / f"m{index}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield "lorem"
    sys.modules.pop("lorem", None)


def test_docstrings_of_a_file_are_in_one_split_with_their_names(package):
    config = lm_config.get_docstrings_config()
    config.data.libraries = (package,)
    config.data.test_fraction = config.validation_fraction = 0.2
    splits = docstrings.load_documents(config)
    assert sum(map(len, splits.values())) == 40
    assert min(map(len, splits.values())) >= 4
    initials = [{text[:4] for text in texts} for texts in splits.values()]
    assert sum(map(len, initials)) == len(set.union(*initials)) == 20
    assert sum("NumPy" in text for texts in splits.values() for text in texts) == 20


def test_too_few_docstrings_are_refused(package):
    config = lm_config.get_docstrings_config()
    config.data.libraries = (package,)
    config.data.min_words = 1000
    with pytest.raises(errors.DataError, match="lorem: 0 train"):
        docstrings.load_documents(config)
