"""Text classification with BERT: KerasHub's encoder, a float32 head of our own."""

import collections
import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from ml_collections import config_dict

from tfamp.training import docstrings, pretrained, tasks, text

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def create(
    config: config_dict.ConfigDict,
    data_dir: str | None = None,
    manual_dir: str | None = None,
) -> tasks.Task:
    """Reads and tokenizes a corpus, and describes the model.

    Args:
      config: `config.data.name` is "docstrings" or "csv" (see those modules);
        `config.data.sequence_length` is the tokens of an example. `config.model` has
        preset: "" for a new encoder, else see `pretrained.find`;
        num_layers, num_heads, hidden_dim, intermediate_dim, max_sequence_length,
        vocabulary_size: sizes of a new encoder, unused with a preset;
        pooling: "cls" for BERT's pooled first token, "mean" for the mean of the last
        hidden states; dropout.
      data_dir: Folder of local files; "docstrings" needs none.
      manual_dir: Unused.

    Returns:
      A `Task`; features are {token_ids, segment_ids, padding_mask}, int32
      [sequence_length].

    Raises:
      DataError: If the data or the preset are missing or malformed.
      ImportError: If an optional dependency is missing.
    """
    del manual_dir
    preset = pretrained.find(config.model.preset) if config.model.preset else None
    _check_lengths(config, preset)
    pretrained.require("keras_hub")  # Now, not after the corpus was read.
    corpus = text.limit(_load_corpus(config, data_dir), config.limit_examples)
    tokenizer = preset.tokenizer if preset else _train_tokenizer(corpus, config)
    splits = (corpus.train, corpus.validation, corpus.test)
    length = config.data.sequence_length
    datasets, cut = zip(*(_dataset(tokenizer, s, length) for s in splits), strict=True)
    return tasks.Task(
        *datasets,
        build_model=lambda: build_model(config, len(corpus.classes), preset),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        description=_describe(corpus, sum(cut), config),
    )


def build_model(
    config: config_dict.ConfigDict,
    num_classes: int,
    preset: pretrained.Preset | None = None,
) -> keras.Model:
    """Builds encoder, dropout and a dense layer under the dtype policy in force.

    The layers are in one flat functional model, so that paths are short and the model
    can be rebuilt from its configuration.

    Args:
      config: As in `create`.
      num_classes: Width of the logits.
      preset: Pretrained encoder; None for a new one of the sizes in `config.model`.

    Returns:
      An uncompiled model from the dictionary of features to float32 logits
      [batch, num_classes].
    """
    if preset:
        backbone = pretrained.build_backbone(preset, config.model.dropout)
    else:
        backbone = _new_backbone(config.model)
    pooled = _pool(backbone, config.model.pooling)
    pooled = keras.layers.Dropout(config.model.dropout, name="pooled_dropout")(pooled)
    logits = keras.layers.Dense(
        num_classes,
        kernel_initializer=keras.initializers.TruncatedNormal(stddev=0.02),
        dtype="float32",
        name="logits",
    )(pooled)
    return keras.Model(backbone.input, logits, name="text_classifier")


def _pool(backbone, pooling):
    """Returns one vector for each text."""
    if pooling == "cls":
        return backbone.output["pooled_output"]
    if pooling != "mean":
        raise ValueError(
            "Unknown pooling. Received: config.model.pooling="
            f"{pooling!r}. Expected 'cls' or 'mean'."
        )
    # In float32: a sum over the tokens loses bits in 16.
    mean = keras.layers.GlobalAveragePooling1D(dtype="float32", name="mean_pooling")
    mask = backbone.input["padding_mask"]
    return mean(backbone.output["sequence_output"], mask=mask)


def encode(
    tokenizer: Any, texts: Sequence[str], length: int
) -> tuple[dict[str, np.ndarray], int]:
    """Turns texts into BERT's inputs.

    Args:
      tokenizer: A `tokenizers` tokenizer with BERT's special tokens; its truncation
        and padding are set.
      texts: Texts.
      length: Tokens of an example, special ones included.

    Returns:
      {token_ids, segment_ids, padding_mask}, each int32 [len(texts), length], and how
      many texts were cut.
    """
    padding_id = tokenizer.token_to_id("[PAD]")
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=padding_id, pad_token="[PAD]")
    encodings = tokenizer.encode_batch(list(texts))
    fields = {
        "token_ids": "ids",
        "segment_ids": "type_ids",
        "padding_mask": "attention_mask",
    }
    features = {
        name: np.array([getattr(item, field) for item in encodings], "int32")
        for name, field in fields.items()
    }
    return features, sum(bool(item.overflowing) for item in encodings)


def train_tokenizer(texts: Sequence[str], vocabulary_size: int) -> Any:
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


def _load_corpus(config, data_dir):
    """Reads the corpus that `config.data.name` names."""
    if config.data.name == "docstrings":
        return docstrings.load(config)
    if config.data.name == "csv":
        return text.load_csv(config, data_dir)
    raise ValueError(
        "Unknown text data. Received: config.data.name="
        f"{config.data.name!r}. Expected 'docstrings' or 'csv'."
    )


def _check_lengths(config, preset):
    """Raises if the examples are longer than the encoder's positions."""
    if preset:
        most = preset.max_sequence_length
    else:
        most = config.model.max_sequence_length
    if most is not None and config.data.sequence_length > most:
        raise ValueError(
            "`config.data.sequence_length` must be at most the encoder's positions. "
            f"Received: {config.data.sequence_length}, positions: {most}."
        )


def _train_tokenizer(corpus, config):
    """Trains the tokenizer of a new encoder on the training split."""
    texts = [example.text for example in corpus.train]
    return train_tokenizer(texts, config.model.vocabulary_size)


def _dataset(tokenizer, examples, length):
    """Returns a dataset of (features, label) and how many texts were cut."""
    features, cut = encode(tokenizer, [e.text for e in examples], length)
    labels = np.array([example.label for example in examples], "int32")
    return tf.data.Dataset.from_tensor_slices((features, labels)), cut


def _new_backbone(model):
    """Builds an encoder with new weights."""
    return pretrained.require("keras_hub").models.BertBackbone(
        vocabulary_size=model.vocabulary_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        hidden_dim=model.hidden_dim,
        intermediate_dim=model.intermediate_dim,
        dropout=model.dropout,
        max_sequence_length=model.max_sequence_length,
    )


def _describe(corpus, truncated, config):
    """Returns the report's line on data and encoder."""
    sizes = [len(part) for part in (corpus.train, corpus.validation, corpus.test)]
    counts = np.bincount([e.label for e in corpus.test], minlength=len(corpus.classes))
    chance = counts.max() / counts.sum()
    sizes_of_new = f"new, {config.model.num_layers} layers of {config.model.hidden_dim}"
    # Of a folder only the last parts: the rest belongs to this host.
    parts = pathlib.PurePath(config.model.preset).parts[-2:]
    encoder = "/".join(parts) if config.model.preset else sizes_of_new
    parts = [
        f"Text classification, {len(corpus.classes)} classes "
        f"({', '.join(corpus.classes)})",
        "{} train / {} validation / {} test texts".format(*sizes),
        f"chance level {chance:.1%} (largest class of the test split)",
        f"{truncated} of {sum(sizes)} texts cut to {config.data.sequence_length} "
        "tokens",
        *corpus.notes,
        f"encoder: {encoder}",
    ]
    return "; ".join(parts) + "."
