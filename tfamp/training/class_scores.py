"""Scores of a classifier on texts: accuracy, F1, and what was predicted for each."""

import json
import pathlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.training import callbacks, run_files, text


def evaluate(
    model: keras.Model,
    batches: tf.data.Dataset,
    corpus: text.Corpus,
    folder: pathlib.Path,
) -> dict[str, float]:
    """Predicts the test split, writes `predictions.json`, and scores it.

    Args:
      model: From features to float32 logits [batch, classes].
      batches: Batches of (features, label) of the test split, in order.
      corpus: Its test examples, whose predictions go into the file, and its classes.
      folder: The run's folder.

    Returns:
      Fractions by name: accuracy and, of two classes, the F1 of the second.
    """
    logits = model.predict(batches, verbose=0)
    write_predictions(folder / "predictions.json", logits, corpus)
    labels = np.array([example.label for example in corpus.test])
    predicted = logits.argmax(axis=1)
    scores = {"accuracy": float(np.mean(predicted == labels))}
    if len(corpus.classes) == 2:
        scores["f1"] = f1(labels, predicted)
    return scores


def f1(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Returns the F1 score of class 1; 0 if it neither occurs nor is predicted.

    Args:
      labels: 0 or 1, [examples].
      predicted: The same.

    Returns:
      2 TP / (2 TP + FP + FN).
    """
    hits = int(np.sum((labels == 1) & (predicted == 1)))
    total = int(np.sum(labels == 1)) + int(np.sum(predicted == 1))
    return 2.0 * hits / total if total else 0.0


def write_predictions(
    path: pathlib.Path, logits: np.ndarray, corpus: text.Corpus
) -> None:
    """Writes a list of each test example's texts, label, prediction and probability.

    Args:
      path: The file; a kill leaves the old one or the new one.
      logits: Float32 [test examples, classes].
      corpus: The test examples in the same order, and the classes.
    """
    # In float64, from the largest logit: no overflow, and the same on every machine.
    with np.errstate(invalid="ignore"):  # Of a run that diverged.
        shifted = logits.astype("float64") - logits.max(axis=1, keepdims=True)
    probabilities = np.exp(shifted)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    rows = [
        _row(index, example, corpus.classes, values)
        for index, (example, values) in enumerate(
            zip(corpus.test, probabilities, strict=True)
        )
    ]
    run_files.write_text(path, json.dumps(rows, indent=1, allow_nan=False))


def _row(index, example, classes, probabilities) -> dict[str, Any]:
    """Returns the entry of one example."""
    best = int(probabilities.argmax())
    texts = {"text": example.text}
    if example.second is not None:
        texts["second"] = example.second
    return {
        "index": index,
        **texts,
        "label": classes[example.label],
        "prediction": classes[best],
        "probability": callbacks.json_number(round(float(probabilities[best]), 6)),
    }
