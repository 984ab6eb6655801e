"""A recurrent language model: embedding, LSTM layers, softmax over a vocabulary.

After the LSTM models of Jozefowicz et al., "Exploring the Limits of Language Modeling",
2016, https://arxiv.org/abs/1602.02410, whose largest is the "bigLSTM" that Micikevicius
et al., "Mixed Precision Training", 2018, https://arxiv.org/abs/1710.03740, trained in
float16 with and without loss scaling. They carry the state of the LSTM over from batch
to batch; here each window starts from zeros, and windows are shuffled.
"""

import functools
import math
import pathlib

import keras
import numpy as np
from ml_collections import config_dict

from tfamp import extras
from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.numerics import compare
from tfamp.recipes import data
from tfamp.recipes.texts import language_data
from tfamp.runs import pipeline, run_files, tasks

_LOGITS = "logits"
_ELEMENTS = 2**24  # Logits whose gradients are counted: 64 MiB of float32.


def create(config: config_dict.ConfigDict) -> tasks.Task:
    """As `tfamp.recipes.language_model.create` says."""
    text = language_data.read(config)
    parts = {
        name: data.slices((windows[:, :-1], windows[:, 1:]))
        for name, windows in text.windows.items()
    }
    return tasks.Task(
        train=parts["train"],
        validation=parts.get("validation"),
        test=parts["test"],
        build_model=lambda: build_model(config, text.vocabulary),
        loss=_loss(),
        metrics=_metrics,
        description=f"Language model, {text.note}; "
        f"{_describe(config, text.vocabulary)}; "
        f"{config.batch_size} x {config.data.sequence_length} tokens a batch; "
        "kept_gradients: share of the logits' nonzero gradients that do not underflow "
        "in the compute dtype of their product.",
        score=functools.partial(_score, config, parts),
        assets={"tokenizer.json": text.tokenizer},
        errors=frozenset({"perplexity"}),
    )


def synthetic(config: config_dict.ConfigDict) -> tasks.Synthetic:
    """As `tfamp.recipes.language_model.synthetic` says."""
    vocabulary, length = config.model.vocabulary_size, config.data.sequence_length
    draw = np.random.default_rng(config.seed).integers
    shape = (tasks.BATCHES, config.batch_size, length + 1)
    ids = draw(vocabulary, size=shape, dtype="int32")
    return tasks.Synthetic(
        lambda: build_model(config, vocabulary),
        data.repeat(ids[..., :-1], ids[..., 1:]),
        f"{_describe(config, vocabulary)}; random tokens, {length} a sequence",
        loss=_loss(),
        metrics=_metrics,
        unit="sequences",
    )


def build_model(config: config_dict.ConfigDict, vocabulary: int) -> keras.Model:
    """Builds the model under the dtype policy in force.

    Args:
      config: `config.data.sequence_length`, and in `config.model`
        embedding_dim, units: widths of the embedding and of each LSTM layer;
        dropout: before and after each LSTM layer, as in Zaremba et al., 2014,
          https://arxiv.org/abs/1409.2329;
        float32_head: whether the product with the vocabulary is in float32. If not, one
          of 4096 tokens or more is in the mode's format, as in bigLSTM, and its logits
          are cast.
      vocabulary: Number of token ids.

    Returns:
      A functional model: int32 [batch, length] to float32 logits
      [batch, length, vocabulary].
    """
    model, layers = config.model, keras.layers
    inputs = keras.Input((config.data.sequence_length,), dtype="int32", name="tokens")
    x = layers.Embedding(vocabulary, model.embedding_dim, name="embedding")(inputs)
    x = layers.Dropout(model.dropout, name="dropout0")(x)
    for number, units in enumerate(model.units, 1):
        x = layers.LSTM(units, return_sequences=True, name=f"lstm{number}")(x)
        x = layers.Dropout(model.dropout, name=f"dropout{number}")(x)
    dtype = "float32" if model.float32_head else None
    logits = layers.Dense(vocabulary, dtype=dtype, name=_LOGITS)(x)
    cast = layers.Activation("linear", dtype="float32", name="float32_logits")
    return keras.Model(inputs, cast(logits), name="language_model")


def _loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _metrics():
    return [extras.require("keras_hub").metrics.Perplexity(from_logits=True)]


def _describe(config, vocabulary):
    """Returns the report's part on the model."""
    model = config.model
    head = "float32" if model.float32_head else "the mode's format"
    return (
        f"vocabulary {vocabulary}, embedding {model.embedding_dim}, LSTM "
        f"{', '.join(map(str, model.units))}, product with the vocabulary in {head}"
    )


# ---- Scores ----


def _score(config, parts, model, folder: pathlib.Path):
    """Returns perplexity and the share of gradients kept; writes the report on them."""
    test = pipeline.evaluation_batches(parts["test"], config.eval_batch_size)
    scores = model.evaluate(test, verbose=0, return_dict=True)
    share = math.nan
    if math.isfinite(scores["perplexity"]):
        share = _kept_gradients(config, parts["train"], model, folder)
    return {"perplexity": scores["perplexity"], "kept_gradients": share}


def _kept_gradients(config, train, model, folder):
    """Compares on a batch of training data, or on as much of it as memory is kept for.

    The loss is a mean over the batch; of a part of it each token's gradient is made as
    small as in the whole.
    """
    rewrite = graph_rewrite.active()
    low = rewrite.dtype if rewrite else model.get_layer(_LOGITS).compute_dtype
    if low == "float32":
        return 1.0
    length, vocabulary = model.output.shape[1:]
    count = min(config.batch_size, max(1, _ELEMENTS // (length * vocabulary)))
    features, labels = next(iter(train.batch(count)))
    loss, share = _loss(), count / config.batch_size
    report = compare.compare_precision(
        *(model, features, f"mixed_{low}" if rewrite else None),
        targets=labels,
        loss=lambda y, x: loss(y, x) * share,
    )
    run_files.write_json(folder / "precision.json", report.to_dict())
    run_files.write_text(folder / "precision.md", report.to_markdown())
    (logits,) = (row for row in report.rows if row.path.endswith(_LOGITS))
    return logits.gradients.kept
