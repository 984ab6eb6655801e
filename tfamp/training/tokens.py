"""Texts as BERT's inputs: WordPiece token ids, segments, padding."""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tfamp.training import pretrained

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


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
) -> Tokens:
    """Turns texts, or pairs of texts, into BERT's inputs.

    Args:
      tokenizer: A `tokenizers` tokenizer with BERT's special tokens; its truncation
        and padding are set.
      texts: Texts.
      length: Tokens of an example, special ones included.
      seconds: The second text of each pair (segment 1); None: single texts.

    Returns:
      `Tokens`.
    """
    padding_id = tokenizer.token_to_id("[PAD]")
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=padding_id, pad_token="[PAD]")
    inputs = list(texts) if seconds is None else list(zip(texts, seconds, strict=True))
    encodings = tokenizer.encode_batch(inputs)
    fields = {
        "token_ids": "ids",
        "segment_ids": "type_ids",
        "padding_mask": "attention_mask",
    }
    features = {
        name: np.array([getattr(item, field) for item in encodings], "int32")
        for name, field in fields.items()
    }
    return Tokens(features, sum(bool(item.overflowing) for item in encodings))


def train(texts: Sequence[str], vocabulary_size: int) -> Any:
    """Trains an uncased WordPiece tokenizer; the same texts give the same tokens.

    Args:
      texts: Texts of the training split only.
      vocabulary_size: Largest number of tokens, the five special ones included.

    Returns:
      A `tokenizers` tokenizer.
    """
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
