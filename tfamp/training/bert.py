"""Text classification with BERT: KerasHub's encoder, a float32 head of our own."""

import keras
import numpy as np
import tensorflow as tf
from ml_collections import config_dict

from tfamp.training import (
    class_scores,
    docstrings,
    encoder,
    glue,
    pipeline,
    pretrained,
    tables,
    tasks,
    text,
    tokens,
)


def create(
    config: config_dict.ConfigDict,
    data_dir: str | None = None,
    manual_dir: str | None = None,
) -> tasks.Task:
    """Reads and tokenizes a corpus, and describes the model.

    Args:
      config: `config.data.name` is "docstrings", "csv" or a name in TFDS such as
        "glue/sst2" (see those modules and `glue`). `config.data` also has
        sequence_length: Most tokens of an example; arrays are as long as the longest
        needs, in multiples of 8.
        token_cache: Where token ids are kept; see `tokens.cached`.
        `config.model` has
        preset: "" for a new encoder, else see `pretrained.find`;
        num_layers, num_heads, hidden_dim, intermediate_dim, max_sequence_length,
        vocabulary_size: sizes of a new encoder, unused with a preset;
        pooling: "cls" for BERT's pooled first token, "mean" for the mean of the last
        hidden states; dropout.
      data_dir: Folder of local files or of data prepared by TFDS; "docstrings" needs
        none.
      manual_dir: Folder with a TFDS data set's original files.

    Returns:
      A `Task`; features are {token_ids, segment_ids, padding_mask}, int32 [length]. Its
      scores are accuracy and, of two classes, the F1 of the second.

    Raises:
      DataError: If the data or the preset are missing or malformed.
      ImportError: If an optional dependency is missing.
    """
    preset = encoder.find(config)
    corpus = _load_corpus(config, data_dir, manual_dir)
    corpus = text.limit(corpus, config.limit_examples)
    tokenizer = preset.tokenizer if preset else _new_tokenizer(corpus, config)
    positions = preset.max_sequence_length if preset else None
    if preset is None:
        positions = config.model.max_sequence_length
    encoded = _encode(tokenizer, corpus, config.data, positions)
    train, validation, test = _datasets(corpus, encoded.features)
    return tasks.Task(
        train,
        validation if corpus.validation else None,
        test,
        build_model=lambda: build_model(config, len(corpus.classes), preset),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        description=_describe(corpus, encoded, config),
        score=lambda model, folder: class_scores.evaluate(
            model,
            pipeline.evaluation_batches(test, config.eval_batch_size),
            corpus,
            folder,
        ),
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


def _load_corpus(config, data_dir, manual_dir):
    """Reads the corpus that `config.data.name` names."""
    if config.data.name == "docstrings":
        return docstrings.load(config)
    if config.data.name == "csv":
        return text.load_csv(config, data_dir)
    if not config.data.name:
        raise ValueError(
            "Unknown text data. Received: config.data.name=''. Expected "
            "'docstrings', 'csv' or a name in TFDS such as 'glue/sst2'."
        )
    return glue.load(config, data_dir, manual_dir)


def _new_tokenizer(corpus, config):
    """Trains the tokenizer of a new encoder on the training split."""
    texts = [part for e in corpus.train for part in (e.text, e.second) if part]
    return tokens.train(texts, config.model.vocabulary_size)


def _encode(tokenizer, corpus, data, positions) -> tokens.Tokens:
    """Tokenizes the three splits, one after another: they have one length."""
    examples = [*corpus.train, *corpus.validation, *corpus.test]
    pairs = examples[0].second is not None
    return tokens.cached(
        data.token_cache,
        tokenizer,
        [example.text for example in examples],
        data.sequence_length,
        [example.second or "" for example in examples] if pairs else None,
        positions=positions,
    )


def _datasets(corpus, features):
    """Returns datasets of (features, label) of the three splits."""
    start = 0
    for part in (corpus.train, corpus.validation, corpus.test):
        end = start + len(part)
        inputs = {name: values[start:end] for name, values in features.items()}
        labels = np.array([example.label for example in part], "int32")
        yield tf.data.Dataset.from_tensor_slices((inputs, labels))
        start = end


def _describe(corpus, encoded, config):
    """Returns the report's line on data and encoder."""
    sizes = [len(part) for part in (corpus.train, corpus.validation, corpus.test)]
    counts = np.bincount([e.label for e in corpus.test], minlength=len(corpus.classes))
    chance = counts.max() / counts.sum()
    length = encoded.features["token_ids"].shape[1]
    parts = [
        f"Text classification, {len(corpus.classes)} classes "
        f"({tables.list_names(corpus.classes)})",
        "{} train / {} validation / {} test texts".format(*sizes),
        f"chance level {chance:.1%} (largest class of the test split)",
        f"{encoded.truncated} of {sum(sizes)} texts cut to "
        f"{config.data.sequence_length} tokens, padded to {length} tokens",
        *corpus.notes,
        encoder.describe(config),
    ]
    return "; ".join(parts) + "."
