"""Text classification with BERT: text in, classes out, a float32 head."""

import functools
import json
import pathlib
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from ml_collections import config_dict

from tfamp import extras
from tfamp.recipes import data
from tfamp.recipes.texts import encoders, text_data, text_sources
from tfamp.runs import run_files, tasks

if TYPE_CHECKING:
    import pandas

_CLASSES = 2  # Of synthetic texts; how many there are costs nothing.
_FIELDS = {
    "token_ids": "ids",
    "segment_ids": "type_ids",
    "padding_mask": "attention_mask",
}


def create(config: config_dict.ConfigDict) -> tasks.Task:
    """As `tfamp.recipes.text_classification.create` says."""
    encoder = encoders.load(config)
    corpus = text_data.load(config)
    parts = corpus.train, corpus.validation, corpus.test
    length = config.data.sequence_length
    tokenizer = encoder.tokenizer or encoders.train_tokenizer(
        [*corpus.train.text, *corpus.train.get("second", ())],
        config.model.vocabulary_size,
    )
    encoded = [encode(tokenizer, part, length) for part in parts]
    width = max(_width(features) for features, _ in encoded)
    train, validation, test = (
        data.slices(
            (
                {name: values[:, :width] for name, values in features.items()},
                part.label.to_numpy("int32"),
            )
        )
        for (features, _), part in zip(encoded, parts, strict=True)
    )
    cut = sum(count for _, count in encoded)
    answer = functools.partial(_answer, config, corpus.classes, tokenizer, width)
    pad = tokenizer.token_to_id("[PAD]")
    # Of the longest text of a batch: all that serving needs.
    tokenizer.enable_padding(pad_id=pad, pad_token="[PAD]")
    return tasks.Task(
        train,
        validation if len(corpus.validation) else None,
        test,
        build_model=lambda: build_model(config, len(corpus.classes), encoder),
        **_classification(),
        description=_describe(corpus, config, encoder, cut, min(width, length)),
        # Matthews' correlation with a constant answer is 0.
        chance=0.0 if _is_cola(config) else _chance(corpus),
        score=functools.partial(_score, config, corpus, answer),
        predict=functools.partial(_predict, config, answer),
        assets={
            "tokenizer.json": tokenizer.to_str(pretty=True) + "\n",
            "labels.json": json.dumps(corpus.classes) + "\n",
        },
    )


def build_model(
    config: config_dict.ConfigDict, num_classes: int, encoder: encoders.Encoder
) -> keras.Model:
    """Builds encoder, dropout and a dense layer under the dtype policy in force.

    The layers are in one flat functional model, so that paths are short.

    Args:
      config: As in `create`.
      num_classes: Width of the logits.
      encoder: From `encoders.load`.

    Returns:
      An uncompiled model from the dictionary of features to float32 logits
      [batch, num_classes].
    """
    backbone = encoder.build()
    pooled = backbone.output["pooled_output"]
    if config.model.pooling == "mean":
        # In float32: a sum over the tokens loses bits in 16.
        mean = keras.layers.GlobalAveragePooling1D(dtype="float32", name="mean_pooling")
        mask = backbone.input["padding_mask"]
        pooled = mean(backbone.output["sequence_output"], mask=mask)
    pooled = keras.layers.Dropout(config.model.dropout, name="pooled_dropout")(pooled)
    logits = keras.layers.Dense(
        num_classes,
        kernel_initializer=keras.initializers.TruncatedNormal(stddev=0.02),
        dtype="float32",
        name="logits",
    )(pooled)
    return keras.Model(backbone.input, logits, name="text_classifier")


def synthetic(config: config_dict.ConfigDict) -> tasks.Synthetic:
    """As `tfamp.recipes.text_classification.synthetic` says."""
    encoder, features, draw = encoders.random_tokens(config)
    labels = draw(_CLASSES, size=features["token_ids"].shape[:2], dtype="int32")
    return tasks.Synthetic(
        lambda: build_model(config, _CLASSES, encoder),
        data.repeat(features, labels),
        f"{encoder.description}; random token ids of full length, no padding",
        unit="sequences",
        **_classification(),
    )


def encode(
    tokenizer: Any, table: "pandas.DataFrame", length: int
) -> tuple[dict[str, np.ndarray], int]:
    """Turns texts, or pairs of texts, into BERT's inputs.

    A pair that is too long loses tokens of its longer text first. "[SEP]" and the like
    in a text are special tokens.

    Args:
      tokenizer: A `tokenizers` tokenizer with BERT's special tokens; its truncation
        and padding are set.
      table: Columns text and, of pairs, second.
      length: Tokens of an example, special ones included.

    Returns:
      {token_ids, segment_ids, padding_mask}, int32 [rows, length], and how many rows
      were cut.
    """
    tokenizer.enable_truncation(length, strategy="longest_first")
    padding = tokenizer.token_to_id("[PAD]")
    tokenizer.enable_padding(length=length, pad_id=padding, pad_token="[PAD]")
    texts = table.text.tolist()
    if "second" in table:
        texts = list(zip(texts, table.second, strict=True))
    features = {name: np.zeros((len(texts), length), "int32") for name in _FIELDS}
    cut = 0
    for row, encoding in enumerate(encoders.encodings(tokenizer, texts)):
        for name, field in _FIELDS.items():
            features[name][row] = getattr(encoding, field)
        cut += bool(encoding.overflowing)
    return features, cut


def _width(features):
    """Tensor Cores want dimensions of multiples of 8."""
    longest = int(features["padding_mask"].sum(1).max(initial=1))
    return -(-longest // 8) * 8


def _classification():
    """Returns a classifier's loss and metrics."""
    return {
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": lambda: [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    }


def _answer(config, classes, tokenizer, width, model, table):
    """Returns the classes of texts, as numbers, and two columns for a person."""
    features, _ = encode(tokenizer, table, config.data.sequence_length)
    width = max(width, _width(features))  # New texts may be longer.
    features = {name: values[:, :width] for name, values in features.items()}
    logits = model.predict(features, batch_size=config.eval_batch_size, verbose=0)
    return logits.argmax(axis=1), data.answers(logits, classes)


def _predict(config, answer, model, rows, folder):
    """Returns the classes of new texts; see `tasks.Task`."""
    pandas = extras.require("pandas")
    texts = data.pick(rows, text_sources.columns(config.data))
    names = ["text", "second"][: texts.shape[1]]
    _, columns = answer(model, texts.set_axis(names, axis=1))
    return pandas.DataFrame(columns)


def _score(config, corpus, answer, model, folder: pathlib.Path):
    """Writes predictions into the folder; returns the scores."""
    metrics = extras.require("sklearn.metrics")
    labels = corpus.test.label.to_numpy()
    predicted, columns = answer(model, corpus.test)
    rows = corpus.test.assign(
        label=[corpus.classes[label] for label in labels], **columns
    )
    content = json.dumps(rows.reset_index(names="index").to_dict("records"), indent=1)
    run_files.write_text(folder / "predictions.json", content + "\n")
    scores = {"accuracy": metrics.accuracy_score(labels, predicted)}
    if len(corpus.classes) == 2:
        scores["f1"] = metrics.f1_score(labels, predicted, zero_division=0.0)
    if _is_cola(config):  # As GLUE scores it.
        scores = {"mcc": metrics.matthews_corrcoef(labels, predicted), **scores}
    return scores


def _is_cola(config):
    return config.data.name.startswith("glue/cola")


def _chance(corpus):
    """The share of the largest class in the test split."""
    return float(corpus.test.label.value_counts(normalize=True).max())


def _describe(corpus, config, encoder, cut, width):
    """Returns the report's line on data and encoder."""
    sizes = [len(part) for part in (corpus.train, corpus.validation, corpus.test)]
    parts = [
        f"Text classification, {len(corpus.classes)} classes "
        f"({data.list_names(corpus.classes)})",
        "{} train / {} validation / {} test texts".format(*sizes),
        f"chance level {_chance(corpus):.1%} (largest class of the test split)",
        f"{cut} of {sum(sizes)} texts cut to {config.data.sequence_length} tokens, "
        f"padded to {width} tokens",
        *corpus.notes,
        encoder.description,
    ]
    return "; ".join(parts) + "."
