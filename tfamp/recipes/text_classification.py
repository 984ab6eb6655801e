"""Text classification with BERT: text in, classes out, a float32 head."""

from typing import TYPE_CHECKING

from ml_collections import config_dict

from tfamp.recipes import presets

if TYPE_CHECKING:
    from tfamp.runs import tasks


def get_config(data: str = "docstrings") -> config_dict.ConfigDict:
    """Returns the defaults of text classification; see `create`.

    Args:
      data: "docstrings", "csv", or a name in TFDS such as "glue/sst2".
    """
    config = presets.get_config()
    config.update(
        {
            "task": f"{__name__}:create",
            "model": {
                # What the classifier reads: "cls", BERT's pooled first token; "mean",
                # the mean of the last hidden states over all tokens but padding, for
                # sentence encoders (MiniLM, E5), which are trained so. Those need a
                # larger step, such as optimizer.learning_rate=2e-4.
                "pooling": "cls",
            },
            "data": {
                "name": data,
                "text_column": "text",
                "second_text_column": "",  # Of pairs of texts.
                "label_column": "label",
            },
        }
    )
    if data == "docstrings":
        config.data.update(
            {
                "libraries": ("matplotlib", "scipy", "sklearn", "tensorflow"),
                "texts_per_library": 2000,
                "min_words": 10,
            }
        )
    elif data == "csv":
        config.data.update(presets.FILES)
    else:
        config.data.sequence_length = config.model.max_sequence_length = 128
        config.tiny.data = {"sequence_length": 32}
    return config


def create(config: config_dict.ConfigDict) -> "tasks.Task":
    """Reads and tokenizes a corpus, and describes the model.

    `tokenizer.json` (of the `tokenizers` library) and `labels.json` turn text into
    features and logits into classes. Scoring writes `predictions.json`.

    Args:
      config: `config.data` has what `text_data.load` reads; `config.model` what
        `encoders.load` reads, and pooling: "cls" or "mean", see `get_config`.

    Returns:
      A `Task`; features are {token_ids, segment_ids, padding_mask}, int32 [length], as
      long as the longest text needs, in multiples of 8. Its scores are accuracy and, of
      two classes, the F1 of the second; of GLUE's CoLA first Matthews' correlation.

    Raises:
      DataError: If the data or the preset are missing or malformed.
      ImportError: If an optional dependency is missing.
      ValueError: If a length is invalid.
    """
    from tfamp.recipes.tasks import text_classification

    return text_classification.create(config)


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
    from tfamp.recipes.tasks import text_classification

    return text_classification.synthetic(config)
