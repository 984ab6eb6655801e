"""Texts as BERT's inputs: WordPiece token ids, segments, padding."""

import collections
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfamp.training import pretrained, token_cache

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_FEWEST = 3  # Tokens: [CLS] text [SEP].
_MULTIPLE = 8  # Tensor Cores want dimensions of multiples of it.
_CHUNK = 10_000  # Texts at a time: the tokenizer's objects are 100 times the ids.
# Fewer texts take two or three seconds on two cores: not worth a file to look after.
FEWEST_CACHED = 20_000


class Tokens(NamedTuple):
    """Examples as BERT reads them.

    Attributes:
      features: {token_ids, segment_ids, padding_mask}, each int32 [examples, length].
      truncated: How many examples were cut.
    """

    features: dict[str, np.ndarray]
    truncated: int


def encode(
    tokenizer: Any,
    texts: Sequence[str],
    length: int,
    seconds: Sequence[str] | None = None,
    *,
    positions: int | None = None,
) -> Tokens:
    """Turns texts, or pairs of texts, into BERT's inputs.

    A pair that is too long loses tokens of its longer text first (of an odd number the
    longer text keeps one more than in Google's code). All are padded to the longest,
    rounded up to a multiple of 8. "[SEP]" and the like in a text are special tokens.

    Args:
      tokenizer: A `tokenizers` tokenizer with BERT's special tokens; its truncation
        and padding are set.
      texts: Texts.
      length: Most tokens of an example, special ones included.
      seconds: The second text of each pair (segment 1); None: single texts.
      positions: Positions of the encoder, which padding does not exceed; None:
        `length`.

    Returns:
      `Tokens`.

    Raises:
      ValueError: If `length` leaves no token for a text.
    """
    if length < _FEWEST:
        raise ValueError(f"`length` must be >= {_FEWEST}. Received: {length}.")
    widest = min(round_up(length), positions or length)
    _set_options(tokenizer, length, widest)
    inputs = list(texts) if seconds is None else list(zip(texts, seconds, strict=True))
    chunks = list(_encode_chunks(tokenizer, inputs, widest))
    features = {
        name: np.concatenate([chunk.features[name] for chunk in chunks])
        for name in chunks[0].features
    }
    longest = int(features["padding_mask"].sum(axis=1).max(initial=1))
    width = min(round_up(longest), widest)
    return Tokens(
        {name: values[:, :width].copy() for name, values in features.items()},
        sum(chunk.truncated for chunk in chunks),
    )


def cached(
    setting: str,
    tokenizer: Any,
    texts: Sequence[str],
    length: int,
    seconds: Sequence[str] | None = None,
    *,
    positions: int | None = None,
) -> Tokens:
    """Does what `encode` does; large corpora are tokenized once and kept on disk.

    The file's name is a hash of the texts, the tokenizer and the lengths.

    Args:
      setting: Folder; "": the user's cache folder (`token_cache.find_folder`); "off":
        nothing is kept.
      tokenizer: As in `encode`.
      texts: As in `encode`; fewer than `FEWEST_CACHED` are not kept.
      length: As in `encode`.
      seconds: As in `encode`.
      positions: As in `encode`.

    Returns:
      `Tokens`.
    """

    def make():
        return _pack(encode(tokenizer, texts, length, seconds, positions=positions))

    _set_options(tokenizer, length, length)  # They are part of the string below.
    arrays = token_cache.remember(
        setting if len(texts) >= FEWEST_CACHED else token_cache.OFF,
        (tokenizer.to_str(), str(length), str(positions), texts, seconds or ()),
        ("token_ids", "segment_ids", "padding_mask", "truncated"),
        make,
    )
    truncated = int(arrays.pop("truncated"))
    return Tokens({k: v.astype("int32") for k, v in arrays.items()}, truncated)


def round_up(length: int) -> int:
    """Returns the next multiple of 8."""
    return -(-length // _MULTIPLE) * _MULTIPLE


def _set_options(tokenizer, length, width):
    """Sets truncation and padding of a tokenizer."""
    padding_id = tokenizer.token_to_id("[PAD]")
    tokenizer.enable_truncation(length, strategy="longest_first")
    tokenizer.enable_padding(length=width, pad_id=padding_id, pad_token="[PAD]")


def _encode_chunks(tokenizer, inputs, width) -> Iterator[Tokens]:
    """Yields the arrays of some texts at a time, `width` wide; one chunk at least."""
    fields = {
        "token_ids": "ids",
        "segment_ids": "type_ids",
        "padding_mask": "attention_mask",
    }
    for start in range(0, max(len(inputs), 1), _CHUNK):
        encodings = tokenizer.encode_batch(inputs[start : start + _CHUNK])
        features = {
            name: np.array(
                [getattr(item, field) for item in encodings], "int32"
            ).reshape(-1, width)
            for name, field in fields.items()
        }
        yield Tokens(features, sum(bool(item.overflowing) for item in encodings))


def _pack(result):
    """Returns arrays for a file; segments and masks are 0 or 1."""
    small = {"segment_ids": "uint8", "padding_mask": "uint8"}
    arrays = {k: v.astype(small.get(k, v.dtype)) for k, v in result.features.items()}
    return {**arrays, "truncated": np.array(result.truncated)}


def train(texts: Sequence[str], vocabulary_size: int) -> Any:
    """Trains an uncased WordPiece tokenizer; the same texts give the same tokens.

    Args:
      texts: Texts of the training split only.
      vocabulary_size: Largest number of tokens, the five special ones included.

    Returns:
      A `tokenizers` tokenizer.

    Raises:
      ValueError: If there are fewer tokens than special ones.
    """
    if vocabulary_size < len(_SPECIAL):
        raise ValueError(
            f"`vocabulary_size` must be >= {len(_SPECIAL)}, the special tokens. "
            f"Received: {vocabulary_size}."
        )
    tokenizers = pretrained.require("tokenizers")
    learner = tokenizers.BertWordPieceTokenizer(lowercase=True)
    letters = _letters(learner, texts, vocabulary_size)
    # Ties between merges go by token id, and the ids of letters by the order of a hash
    # map, another one in each run (tokenizers 0.23). As special tokens they are fixed;
    # the tokenizer that is returned has the five special ones only.
    learner.train_from_iterator(
        texts,
        vocab_size=vocabulary_size,
        min_frequency=2,
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        special_tokens=[*_SPECIAL, *letters, *(f"##{letter}" for letter in letters)],
        show_progress=False,
    )
    return tokenizers.BertWordPieceTokenizer(learner.get_vocab(), lowercase=True)


def _letters(tokenizer, texts, vocabulary_size):
    """Returns the most frequent characters, sorted; at most half the vocabulary's."""
    normalize = tokenizer.normalizer.normalize_str
    counts = collections.Counter(c for item in texts for c in normalize(item))
    counts.pop(" ", None)
    most = (vocabulary_size - len(_SPECIAL)) // 4  # Each one has a "##" form too.
    return sorted(sorted(counts, key=lambda c: (-counts[c], c))[:most])
