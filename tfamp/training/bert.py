"""Text classification with BERT: KerasHub's encoder, a float32 head of our own."""

import keras
import numpy as np
import tensorflow as tf
from ml_collections import config_dict

from tfamp.training import docstrings, encoder, pretrained, tasks, text, tokens


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
    preset = encoder.find(config)
    corpus = text.limit(_load_corpus(config, data_dir), config.limit_examples)
    tokenizer = preset.tokenizer if preset else _new_tokenizer(corpus, config)
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
    backbone = encoder.build(config, preset)
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


def _new_tokenizer(corpus, config):
    """Trains the tokenizer of a new encoder on the training split."""
    texts = [example.text for example in corpus.train]
    return tokens.train(texts, config.model.vocabulary_size)


def _dataset(tokenizer, examples, length):
    """Returns a dataset of (features, label) and how many texts were cut."""
    encoded = tokens.encode(tokenizer, [e.text for e in examples], length)
    labels = np.array([example.label for example in examples], "int32")
    dataset = tf.data.Dataset.from_tensor_slices((encoded.features, labels))
    return dataset, encoded.truncated


def _describe(corpus, truncated, config):
    """Returns the report's line on data and encoder."""
    sizes = [len(part) for part in (corpus.train, corpus.validation, corpus.test)]
    counts = np.bincount([e.label for e in corpus.test], minlength=len(corpus.classes))
    chance = counts.max() / counts.sum()
    parts = [
        f"Text classification, {len(corpus.classes)} classes "
        f"({', '.join(corpus.classes)})",
        "{} train / {} validation / {} test texts".format(*sizes),
        f"chance level {chance:.1%} (largest class of the test split)",
        f"{truncated} of {sum(sizes)} texts cut to {config.data.sequence_length} "
        "tokens",
        *corpus.notes,
        encoder.describe(config),
    ]
    return "; ".join(parts) + "."
