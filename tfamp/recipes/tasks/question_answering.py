"""Extractive question answering with BERT: a float32 span head, n-best answers."""

import collections
import functools
import json
import pathlib
import re
import statistics
import string
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import keras
from ml_collections import config_dict

from tfamp import extras
from tfamp.recipes import data as data_sets
from tfamp.recipes.texts import encoders, squad_data, squad_windows
from tfamp.runs import run_files, tasks

if TYPE_CHECKING:
    import pandas

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def create(config: config_dict.ConfigDict) -> tasks.Task:
    """As `tfamp.recipes.question_answering.create` says."""
    data = config.data
    if data.max_query_length >= data.sequence_length - squad_windows.SPECIAL:
        raise ValueError(
            "`config.data.max_query_length` must leave tokens for the context: below "
            f"sequence_length - {squad_windows.SPECIAL}. Received: "
            f"max_query_length={data.max_query_length}, "
            f"sequence_length={data.sequence_length}."
        )
    encoder = encoders.load(config)
    splits = squad_data.load(config)
    parts = splits.train, splits.validation, splits.test
    tokenizer = encoder.tokenizer or encoders.train_tokenizer(
        [*splits.train.context.unique(), *splits.train.question],
        config.model.vocabulary_size,
    )
    cut = [_cut(config.data, tokenizer, part) for part in parts]
    train, validation, test = (
        data_sets.slices((windows.features, windows.labels)) for windows in cut
    )
    return tasks.Task(
        train,
        validation if len(splits.validation) else None,
        test,
        build_model=lambda: build_model(encoder),
        **_spans(),
        description=_describe(splits, cut, config, encoder),
        score=functools.partial(_score, config, splits.test, cut[2]),
        predict=functools.partial(_predict, config, tokenizer),
        assets={"tokenizer.json": tokenizer.to_str(pretty=True)},
    )


def _cut(data, tokenizer, questions):
    return squad_windows.cut(
        tokenizer,
        questions,
        length=data.sequence_length,
        doc_stride=data.doc_stride,
        max_query_length=data.max_query_length,
    )


def synthetic(config: config_dict.ConfigDict) -> tasks.Synthetic:
    """As `tfamp.recipes.question_answering.synthetic` says."""
    encoder, features, draw = encoders.random_tokens(config)
    shape = features["token_ids"].shape
    return tasks.Synthetic(
        lambda: build_model(encoder),
        data_sets.repeat(features, draw(shape[2], size=(*shape[:2], 2), dtype="int32")),
        f"{encoder.description}; random token ids of full length, no padding",
        unit="sequences",
        **_spans(),
    )


def build_model(encoder: encoders.Encoder) -> keras.Model:
    """Builds encoder and span head under the dtype policy in force.

    The sparse cross-entropy of the output, averaged over both rows, is the mean of
    those of the first and of the last token: BERT's loss.

    Args:
      encoder: From `encoders.load`.

    Returns:
      An uncompiled model from the dictionary of features to float32 logits
      [batch, 2, length]: scores of each token as an answer's first, and as its last.
    """
    backbone = encoder.build()
    logits = keras.layers.Dense(
        2,
        kernel_initializer=keras.initializers.TruncatedNormal(stddev=0.02),
        dtype="float32",
        name="span_logits",
    )(backbone.output["sequence_output"])
    logits = keras.layers.Permute((2, 1), dtype="float32", name="spans")(logits)
    return keras.Model(backbone.input, logits, name="question_answering")


def _spans():
    """Returns loss and metrics."""
    metric = keras.metrics.SparseCategoricalAccuracy
    return {
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": lambda: [metric(name="position_accuracy")],
    }


def _describe(splits, cut, config, encoder):
    """Returns the report's line on data and encoder."""
    data = config.data
    questions = [len(part) for part in splits[:3]]
    counts = [len(windows.question) for windows in cut]
    without = [int((windows.labels[:, 0] == 0).sum()) for windows in cut]
    validation = (
        f"{without[1]} of {counts[1]} validation windows without it, which position "
        "accuracy counts"
    )
    parts = [
        f"Extractive question answering, {data.name}",
        "{} train / {} validation / {} test questions".format(*questions),
        "{} / {} / {} windows".format(*counts)
        + f" of up to {data.sequence_length} tokens, at most {data.doc_stride} apart "
        f"({sum(counts) / sum(questions):.2f} a question)",
        f"{without[0]} of {counts[0]} training windows without the whole answer",
        validation * bool(counts[1]),
        f"{sum(windows.cut_questions for windows in cut)} of {sum(questions)} "
        f"questions cut to {data.max_query_length} tokens",
        *splits.notes,
        encoder.description,
    ]
    return "; ".join(filter(None, parts)) + "."


# ---- Scores ----


def _predict(config, tokenizer, model, rows, folder):
    """Returns the answers to new questions; see `tasks.Task`."""
    pandas = extras.require("pandas")
    columns = squad_data.columns(config.data)
    questions = data_sets.pick(rows, columns).set_axis(["context", "question"], axis=1)
    count = len(questions)  # Their answers are nowhere.
    questions = questions.assign(answers=[("",)] * count, starts=[(0,)] * count)
    windows = _cut(config.data, tokenizer, questions)
    best = [nbest[0] for nbest in _answer(config, questions, windows, model)]
    return pandas.DataFrame(
        {
            "answer": [answer["text"] for answer in best],
            "probability": [round(float(x["probability"]), 6) for x in best],
        }
    )


def _answer(config, questions, windows, model):
    """Returns the best answers to each question; see `squad_windows.decode`."""
    return squad_windows.decode(
        data_sets.predict(model, windows.features, config),
        windows,
        questions.context,
        n_best_size=config.data.n_best_size,
        max_answer_length=config.data.max_answer_length,
    )


def _score(config, questions, windows, model, folder: pathlib.Path):
    """Writes predictions into the folder; returns the scores."""
    nbest = _answer(config, questions, windows, model)
    answers = dict(zip(questions.id, nbest, strict=True))
    best = {name: each[0]["text"] for name, each in answers.items()}
    for name, content in (("predictions", best), ("nbest_predictions", answers)):
        text = json.dumps(content, indent=2) + "\n"
        run_files.write_text(folder / f"{name}.json", text)
    names = ("f1", "exact_match")
    return score(
        questions, best, ("jaccard", *names) if config.data.name == "csv" else names
    )


def score(
    questions: "pandas.DataFrame",
    predictions: Mapping[str, str],
    names: Sequence[str] = ("f1", "exact_match"),
) -> dict[str, float]:
    """Scores predictions: the best over a question's answers, the mean over questions.

    Args:
      questions: Columns id and answers.
      predictions: Question id -> text. A question without one scores 0.
      names: Keys of `METRICS`.

    Returns:
      Fractions in [0, 1] by name.
    """
    pairs = [
        (predictions.get(name), answers)
        for name, answers in zip(questions.id, questions.answers, strict=True)
    ]
    return {
        name: statistics.fmean(
            0.0 if text is None else max(METRICS[name](text, gold) for gold in answers)
            for text, answers in pairs
        )
        for name in names
    }


def exact_match(prediction: str, gold: str) -> float:
    """Returns 1 if two answers are the same once normalized, else 0."""
    return float(_words(prediction) == _words(gold))


def f1(prediction: str, gold: str) -> float:
    """Returns the F1 of the words of two normalized answers.

    As in the official script of SQuAD 1.1, answers without a common word score 0, two
    without any word too.
    """
    predicted, expected = _words(prediction), _words(gold)
    common = (collections.Counter(predicted) & collections.Counter(expected)).total()
    # The harmonic mean of common / predicted and common / expected.
    return 2 * common / (len(predicted) + len(expected)) if common else 0.0


def jaccard(prediction: str, gold: str) -> float:
    """Returns the share of common words in all words, in lower case.

    The score of Kaggle's "Tweet Sentiment Extraction": words are what spaces separate,
    punctuation included, and a word counts once. Two empty texts score 1.
    """
    predicted, expected = (set(text.lower().split()) for text in (prediction, gold))
    words = predicted | expected
    return len(predicted & expected) / len(words) if words else 1.0


METRICS = {"f1": f1, "exact_match": exact_match, "jaccard": jaccard}


def _words(answer):
    """Returns the words in lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split()
