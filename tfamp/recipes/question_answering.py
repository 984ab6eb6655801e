"""Extractive question answering with BERT: a float32 span head, n-best answers."""

from typing import TYPE_CHECKING

from ml_collections import config_dict

from tfamp.recipes import presets

if TYPE_CHECKING:
    from tfamp.runs import tasks


def get_config(data: str = "squad") -> config_dict.ConfigDict:
    """Returns the defaults of extractive questions; see `create`.

    Lengths are those of Google's `run_squad.py`
    (https://github.com/google-research/bert).

    Args:
      data: "squad", a name in TFDS of data like it, or "csv".
    """
    config = presets.get_config()
    config.update(
        {
            "task": f"{__name__}:create",
            # Position accuracy also counts windows without the answer: it selects
            # poorly.
            "validation_fraction": 0.0,
            "eval_batch_size": 32,
            "data": {
                "name": data,
                "train_file": "train-v1.1.json",
                "test_file": "dev-v1.1.json",  # "": a share of the other is held out.
                "sequence_length": 384,
                "doc_stride": 128,  # Tokens from one window's start to the next.
                "max_query_length": 64,  # Tokens of the question.
                "max_answer_length": 30,  # Tokens of a predicted answer.
                "n_best_size": 20,  # Starts, ends and answers that are considered.
            },
            "model": {"max_sequence_length": 384},
            "tiny": {
                "data": {
                    "sequence_length": 64,
                    "doc_stride": 32,
                    "max_query_length": 16,
                }
            },
        }
    )
    if data == "csv":
        config.data.update(
            {
                **presets.FILES,
                "context_column": "text",
                "question_column": "sentiment",
                "answer_column": "selected_text",
            }
        )
    return config


def create(config: config_dict.ConfigDict) -> "tasks.Task":
    """Reads and tokenizes questions and their contexts, and describes the model.

    The score is F1, with exact match, as SQuAD 1.1 has them; for CSV files Jaccard,
    with both. Scoring writes `predictions.json`, {question id: text}, and
    `nbest_predictions.json` into the run's folder.

    Args:
      config: `config.data` has what `squad_data.load` reads, and
        sequence_length: tokens of question and window together;
        doc_stride, max_query_length: see `squad_windows.cut`;
        n_best_size, max_answer_length: see `squad_windows.decode`.
        `config.model` has what `encoders.load` reads.

    Returns:
      A `Task`; features are {token_ids, segment_ids, padding_mask}, int32 [length],
      a label is the first and the last token of the answer, int32 [2].

    Raises:
      DataError: If the data or the preset are missing or malformed.
      ImportError: If an optional dependency is missing.
      ValueError: If a length is invalid.
    """
    from tfamp.recipes.tasks import question_answering

    return question_answering.create(config)


def synthetic(config: config_dict.ConfigDict) -> "tasks.Synthetic":
    """Describes the model, and makes batches of random tokens of full length.

    Args:
      config: As in `create`; `config.batch_size` is that of the batches.

    Returns:
      A `tasks.Synthetic`.

    Raises:
      DataError: If the preset is missing or malformed.
      ValueError: If texts are longer than its positions.
    """
    from tfamp.recipes.tasks import question_answering

    return question_answering.synthetic(config)
