"""A recurrent language model: embedding, LSTM layers, softmax over a vocabulary.

After the LSTM models of Jozefowicz et al., "Exploring the Limits of Language Modeling",
2016, https://arxiv.org/abs/1602.02410, whose largest is the "bigLSTM" that Micikevicius
et al., "Mixed Precision Training", 2018, https://arxiv.org/abs/1710.03740, trained in
float16 with and without loss scaling. They carry the state of the LSTM over from batch
to batch; here each window starts from zeros, and windows are shuffled.
"""

import functools
import json
import pathlib

import keras
import numpy as np
import tensorflow as tf
from ml_collections import config_dict

from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.numerics import statistics
from tfamp.training import benchmark_inputs, lm_data, pipeline, run_files, tasks

UNIT = "sequences"
_LOGITS = "logits"
_ELEMENTS = 2**24  # Logits whose gradients are counted: 64 MiB of float32.


@keras.saving.register_keras_serializable("tfamp")
class Perplexity(keras.metrics.MeanMetricWrapper):
    """exp of the mean cross-entropy of a batch of tokens, in float32.

    Args:
      name: Name of the metric.
      dtype: Of the sums; float32 whatever the dtype policy.
    """

    def __init__(self, name: str = "perplexity", dtype: str = "float32"):
        function = functools.partial(
            keras.losses.sparse_categorical_crossentropy, from_logits=True
        )
        super().__init__(function, name=name, dtype=dtype)

    def result(self):
        """Returns the perplexity so far; infinite beyond float32, NaN of a NaN."""
        return keras.ops.exp(super().result())

    def get_config(self):
        """Returns the arguments."""
        return {"name": self.name, "dtype": self.dtype}


def create(
    config: config_dict.ConfigDict,
    data_dir: str | None = None,
    manual_dir: str | None = None,
) -> tasks.Task:
    """Reads text and describes the model.

    The scores are the perplexity of the test split, and `kept_gradients`: the share of
    the gradient values at the logits that the format of their product does not round to
    0, at the loss scale in force. Scoring writes into the run's folder `underflow.json`
    and `underflow.md`, an `UnderflowReport`, and `tokenizer.json`, see `lm_data.Text`.

    Args:
      config: `config.data` has what `lm_data.load` reads, `config.model` what
        `build_model` does.
      data_dir: Folder of text files.
      manual_dir: Unused.

    Returns:
      A `Task`; features are token ids, int32 [length], labels the tokens after each.

    Raises:
      DataError: If there is too little text.
      ValueError: If a setting makes no sense.
    """
    check_synthetic(config)
    text = lm_data.load(config, data_dir)
    parts = {name: _dataset(windows) for name, windows in text.windows.items()}
    return tasks.Task(
        train=parts["train"],
        validation=parts.get("validation"),
        test=parts["test"],
        build_model=lambda: build_model(config, text.vocabulary),
        loss=_loss(),
        metrics=lambda: [Perplexity()],
        description=_describe(config, text),
        score=functools.partial(_score, config, text, parts),
        errors=frozenset({"perplexity"}),
    )


def build_model(config: config_dict.ConfigDict, vocabulary: int) -> keras.Model:
    """Builds the model under the dtype policy in force.

    Args:
      config: `config.data.sequence_length`, and in `config.model`
        embedding_dim, units: widths of the embedding and of each LSTM layer;
        dropout: before and after each LSTM layer, as in Zaremba et al., 2014,
          https://arxiv.org/abs/1409.2329;
        float32_head: whether the product with the vocabulary is in float32. If not it
          is in the policy's format, as in bigLSTM, and its logits are cast;
        unroll: whether the LSTM's time steps are laid out in the graph.
      vocabulary: Number of token ids.

    Returns:
      A functional model: int32 [batch, length] to float32 logits
      [batch, length, vocabulary].
    """
    model = config.model
    inputs = keras.Input((config.data.sequence_length,), dtype="int32", name="tokens")
    embedding = keras.layers.Embedding(
        vocabulary, model.embedding_dim, name="embedding"
    )
    x = keras.layers.Dropout(model.dropout, name="dropout0")(embedding(inputs))
    for number, units in enumerate(model.units, 1):
        x = keras.layers.LSTM(
            units, return_sequences=True, unroll=model.unroll, name=f"lstm{number}"
        )(x)
        x = keras.layers.Dropout(model.dropout, name=f"dropout{number}")(x)
    dtype = "float32" if model.float32_head else None
    logits = keras.layers.Dense(vocabulary, dtype=dtype, name=_LOGITS)(x)
    cast = keras.layers.Activation("linear", dtype="float32", name="float32_logits")
    return keras.Model(inputs, cast(logits), name="language_model")


def check_synthetic(config: config_dict.ConfigDict) -> None:
    """Raises ValueError if the model's settings make no sense."""
    units = config.model.units
    if not units or config.model.embedding_dim < 1 or min(units) < 1:
        raise ValueError(
            "The embedding and at least one LSTM layer need a width of at least 1. "
            f"Received: config.model.embedding_dim={config.model.embedding_dim}, "
            f"config.model.units={tuple(units)}."
        )


def synthetic(config: config_dict.ConfigDict) -> tasks.Synthetic:
    """Describes the model, and makes batches of random tokens.

    Args:
      config: As in `create`; the vocabulary is `config.model.vocabulary_size`.

    Returns:
      A `tasks.Synthetic`.
    """
    check_synthetic(config)
    vocabulary, length = config.model.vocabulary_size, config.data.sequence_length
    draw = np.random.default_rng(config.seed).integers
    shape = (8, config.batch_size, length + 1)  # Eight batches, again and again.
    ids = draw(vocabulary, size=shape, dtype="int32")
    return tasks.Synthetic(
        lambda: build_model(config, vocabulary),
        benchmark_inputs.repeat(ids[..., :-1], ids[..., 1:]),
        f"{_describe_model(config, vocabulary)}; random tokens, {length} a sequence",
        loss=_loss(),
        metrics=lambda: [Perplexity()],
        unit=UNIT,
    )


def _loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _dataset(windows):
    """Returns a dataset of (tokens, the tokens after each)."""
    return tf.data.Dataset.from_tensor_slices((windows[:, :-1], windows[:, 1:]))


def _score(config, text, parts, model, folder: pathlib.Path):
    """Returns perplexity and the share of gradients kept; writes the report on them."""
    run_files.write_text(folder / "tokenizer.json", text.tokenizer)
    test = pipeline.evaluation_batches(parts["test"], config.eval_batch_size)
    scores = model.evaluate(test, verbose=0, return_dict=True)
    report = _measure_underflow(config, parts["train"], model)
    shares = json.dumps(report.to_dict(), indent=2)
    run_files.write_text(folder / "underflow.json", shares)
    run_files.write_text(folder / "underflow.md", report.to_markdown())
    kept = report.row(_LOGITS).scaled.kept
    return {"perplexity": scores["perplexity"], "kept_gradients": kept}


def _measure_underflow(config, train, model):
    """Counts on a batch of training data, or on as much of it as memory is kept for.

    The loss is a mean over the batch; of a part of it each token's gradient is made as
    small as in the whole.
    """
    length, vocabulary = model.output.shape[1:]
    count = min(config.batch_size, max(1, _ELEMENTS // (length * vocabulary)))
    features, labels = next(iter(train.batch(count)))
    loss = _loss()
    rewrite = graph_rewrite.active()
    scale = getattr(model.optimizer, "dynamic_scale", 1.0)
    report = statistics.gradient_underflow(
        model,
        lambda y, x: loss(y, x) * (count / config.batch_size),
        features,
        labels,
        dtype=rewrite.dtype if rewrite else model.get_layer(_LOGITS).compute_dtype,
        loss_scale=float(keras.ops.convert_to_numpy(scale)),
    )
    if count == config.batch_size:
        return report
    # A weight's gradient is a sum over the batch.
    rows = tuple(row for row in report.rows if row.kind == "activation")
    return report._replace(rows=rows)


def _describe(config, text):
    """Returns the report's line on data and model."""
    length = config.data.sequence_length
    sizes = " / ".join(
        f"{len(windows) * length} {name}" for name, windows in text.windows.items()
    )
    parts = [
        f"Language model, {text.note}",
        f"{sizes} tokens ({config.data.unit}), {text.characters_per_token:.2f} test "
        f"characters a token, {text.unknown:.2%} unknown",
        _describe_model(config, text.vocabulary),
        f"{config.batch_size} x {length} tokens a batch",
        "kept_gradients: share of the logits' nonzero gradient values that the format "
        "of their product does not round to 0",
    ]
    return "; ".join(parts) + "."


def _describe_model(config, vocabulary):
    model = config.model
    units = ", ".join(map(str, model.units))
    head = "float32" if model.float32_head else "the mode's format"
    return (
        f"vocabulary {vocabulary}, embedding {model.embedding_dim}, LSTM {units}, "
        f"product with the vocabulary in {head}"
    )
