"""Extractive question answering with BERT: a float32 span head, n-best answers."""

import functools
import json
import pathlib
import sys
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf
from ml_collections import config_dict

from tfamp.training import (
    encoder,
    pipeline,
    pretrained,
    run_files,
    spans,
    squad,
    squad_scores,
    squad_splits,
    tasks,
    tokens,
)
from tfamp.training import windows as windows_module


def create(
    config: config_dict.ConfigDict,
    data_dir: str | None = None,
    manual_dir: str | None = None,
) -> tasks.Task:
    """Reads and tokenizes questions and their contexts, and describes the model.

    The score is F1, with exact match, as SQuAD 1.1 has them; for CSV files Jaccard,
    with both. Scoring writes `predictions.json`, {question id: text}, and
    `nbest_predictions.json` into the run's folder.

    Args:
      config: `config.data` has what `squad_splits.load` reads, and
        sequence_length: tokens of question and window together;
        doc_stride, max_query_length: see `windows.cut`;
        n_best_size, max_answer_length: see `spans.decode`;
        token_cache: where tokens are kept, see `windows.cut`.
        `config.model` has what `encoder.find` and `encoder.build` read.
      data_dir: Folder of data prepared by TFDS, or of CSV files.
      manual_dir: Folder with a TFDS data set's original files.

    Returns:
      A `Task`; features are {token_ids, segment_ids, padding_mask}, int32 [length],
      a label is the first and the last token of the answer, int32 [2].

    Raises:
      DataError: If the data or the preset are missing or malformed.
      ImportError: If an optional dependency is missing.
      ValueError: If a length makes no sense.
    """
    _check(config.data)
    preset = encoder.find(config)
    splits = squad_splits.load(config, data_dir, manual_dir)
    tokenizer = preset.tokenizer if preset else _train_tokenizer(splits.train, config)
    cut = [
        _cut(tokenizer, part, config, preset)
        for part in (splits.train, splits.validation, splits.test)
    ]
    train, validation, test = (_dataset(windows) for windows in cut)
    return tasks.Task(
        train=train,
        validation=validation if splits.validation else None,
        test=test,
        build_model=lambda: build_model(config, preset),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: [
            keras.metrics.SparseCategoricalAccuracy(name="position_accuracy")
        ],
        description=_describe(splits, cut, config),
        score=functools.partial(_score, config, splits.test, cut[2]),
    )


def build_model(
    config: config_dict.ConfigDict, preset: pretrained.Preset | None = None
) -> keras.Model:
    """Builds encoder and span head under the dtype policy in force.

    The sparse cross-entropy of the output, averaged over both rows, is the mean of
    those of the first and of the last token: BERT's loss.

    Args:
      config: As in `create`.
      preset: Pretrained encoder; None for a new one of the sizes in `config.model`.

    Returns:
      An uncompiled model from the dictionary of features to float32 logits
      [batch, 2, length]: scores of each token as an answer's first, and as its last.
    """
    backbone = encoder.build(config, preset)
    logits = keras.layers.Dense(
        2,
        kernel_initializer=keras.initializers.TruncatedNormal(stddev=0.02),
        dtype="float32",
        name="span_logits",
    )(backbone.output["sequence_output"])
    logits = keras.layers.Permute((2, 1), dtype="float32", name="spans")(logits)
    return keras.Model(backbone.input, logits, name="question_answering")


def predict(
    model: keras.Model,
    questions: Sequence[squad.Question],
    windows: windows_module.Windows,
    config: config_dict.ConfigDict,
) -> list[list[spans.Span]]:
    """Answers questions.

    Args:
      model: From `build_model`, or one of the same inputs and outputs.
      questions: Questions.
      windows: Their windows.
      config: As in `create`; `config.eval_batch_size` windows at a time.

    Returns:
      For each question its best answers, the best first; see `spans.decode`.
    """
    batches = pipeline.evaluation_batches(
        tf.data.Dataset.from_tensor_slices(windows.features), config.eval_batch_size
    )
    # A bar on a terminal; a file has the trainer's lines.
    logits = model.predict(batches, verbose=1 if sys.stdout.isatty() else 0)
    return spans.decode(
        logits,
        windows,
        [question.context for question in questions],
        n_best_size=config.data.n_best_size,
        max_answer_length=config.data.max_answer_length,
    )


def _check(settings):
    """Refuses settings that make no sense, before any data are read."""
    windows_module.check_settings(
        settings.sequence_length, settings.doc_stride, settings.max_query_length
    )
    spans.check_settings(settings.n_best_size, settings.max_answer_length)


def _score(config, questions, windows, model, folder: pathlib.Path):
    """Writes the predictions for the test split, and returns their scores."""
    answers = predict(model, questions, windows, config)
    found = {q.id: nbest for q, nbest in zip(questions, answers, strict=True)}
    best = {name: nbest[0].text for name, nbest in found.items()}
    every = {name: [s._asdict() for s in nbest] for name, nbest in found.items()}
    for name, content in (("predictions", best), ("nbest_predictions", every)):
        text = json.dumps(content, indent=2) + "\n"
        run_files.write_text(folder / f"{name}.json", text)
    own = ("jaccard",) if config.data.name == "csv" else ()
    return squad_scores.score(questions, best, (*own, "f1", "exact_match"))


def _train_tokenizer(questions, config):
    """Trains a tokenizer on the training split."""
    contexts = dict.fromkeys(question.context for question in questions)
    texts = [*contexts, *(question.question for question in questions)]
    return tokens.train(texts, config.model.vocabulary_size)


def _cut(tokenizer, questions, config, preset):
    """Cuts the windows of one split."""
    model = config.model
    positions = preset.max_sequence_length if preset else model.max_sequence_length
    return windows_module.cut(
        tokenizer,
        questions,
        length=config.data.sequence_length,
        doc_stride=config.data.doc_stride,
        max_query_length=config.data.max_query_length,
        positions=positions,
        cache=config.data.token_cache,
    )


def _dataset(windows):
    """Returns a dataset of (features, label)."""
    return tf.data.Dataset.from_tensor_slices((windows.features, windows.labels))


def _describe(splits, cut, config):
    """Returns the report's line on data and encoder."""
    settings = config.data
    questions = [len(part) for part in splits[:3]]
    counts = [len(windows.question) for windows in cut]
    without = [int(np.sum(windows.labels[:, 0] == 0)) for windows in cut]
    parts = [
        f"Extractive question answering, {settings.name}",
        "{} train / {} validation / {} test questions".format(*questions),
        "{} / {} / {} windows".format(*counts)
        + f" of up to {settings.sequence_length} tokens, at most "
        f"{settings.doc_stride} apart ({sum(counts) / sum(questions):.2f} a question)",
        f"{without[0]} of {counts[0]} training windows without the whole answer",
        *_selection(without[1], counts[1]),
        f"{sum(windows.cut_questions for windows in cut)} of {sum(questions)} "
        f"questions cut to {settings.max_query_length} tokens",
        *splits.notes,
        encoder.describe(config),
    ]
    return "; ".join(parts) + "."


def _selection(without, count):
    """Returns what the score that selects the checkpoint counts, if one does."""
    if not count:
        return ()
    return (
        f"{without} of {count} validation windows without it, which position accuracy "
        "counts",
    )
