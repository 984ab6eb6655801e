"""A recurrent language model: embedding, LSTM layers, softmax over a vocabulary.

After the LSTM models of Jozefowicz et al., "Exploring the Limits of Language Modeling",
2016, https://arxiv.org/abs/1602.02410, whose largest is the "bigLSTM" that Micikevicius
et al., "Mixed Precision Training", 2018, https://arxiv.org/abs/1710.03740, trained in
float16 with and without loss scaling. They carry the state of the LSTM over from batch
to batch; here each window starts from zeros, and windows are shuffled.
"""

from typing import TYPE_CHECKING

from ml_collections import config_dict

from tfamp.runs import default_config

if TYPE_CHECKING:
    from tfamp.runs import tasks


def get_config(source: str) -> config_dict.ConfigDict:
    """Returns the defaults.

    Args:
      source: `config.data.name`: "docstrings" of installed packages, or "text_file".
    """
    config = default_config.get_config()
    config.update(
        {
            "task": f"{__name__}:create",
            "batch_size": 128,
            "eval_batch_size": 128,
            "validation_fraction": 0.05,
            "optimizer": {
                "schedule": "cosine",
                "warmup_fraction": 0.05,
                "clip_global_norm": 1.0,
            },
            "data": {
                "name": source,
                "unit": "wordpiece",  # Or "character".
                "sequence_length": 32,  # Tokens that the state is carried over.
                "test_fraction": 0.05,
            },
            "model": {
                "name": "lstm",
                # Most tokens of a trained WordPiece tokenizer; characters are as many
                # as there are.
                "vocabulary_size": 8192,
                "embedding_dim": 128,
                "units": (128,),  # Of each LSTM layer.
                "dropout": 0.2,
                # True: the product with the vocabulary is in float32, too, not only the
                # softmax. A vocabulary below 4096 has that anyway, as all outputs that
                # are small.
                "float32_head": False,
            },
            "tiny": {
                "data": {"sequence_length": 8},
                "model": {"vocabulary_size": 512, "embedding_dim": 16, "units": (16,)},
            },
        }
    )
    if source == "docstrings":
        config.data.update(
            {
                "libraries": (
                    *("keras", "matplotlib", "numpy", "scipy", "sklearn", "tensorflow"),
                ),
                "texts_per_library": 100_000,  # All there are.
                "min_words": 8,
                "split_seed": 0,
            }
        )
        config.tiny.data.libraries = ("keras",)
    else:
        config.data.text_files = "*.txt"  # In --data_dir; a name, or a pattern.
    return config


def create(config: config_dict.ConfigDict) -> "tasks.Task":
    """Reads text and describes the model.

    The scores are the perplexity of the test split, and `kept_gradients`: the share of
    the gradient values at the logits that the format of their product does not round to
    0, at the loss scale in force. Scoring writes into the run's folder `precision.json`
    and `precision.md`, a `PrecisionComparison`; of `tokenizer.json` see
    `language_data.Text`.

    Args:
      config: `config.data` has what `language_data.read` reads, `config.model` what
        `build_model` does.

    Returns:
      A `Task`; features are token ids, int32 [length], labels the tokens after each.

    Raises:
      DataError: If there is no text, or too little.
      ValueError: If a setting is invalid.
    """
    from tfamp.recipes.tasks import language_model

    return language_model.create(config)


def synthetic(config: config_dict.ConfigDict) -> "tasks.Synthetic":
    """Describes the model, and makes batches of random tokens.

    Args:
      config: As in `create`; the vocabulary is `config.model.vocabulary_size`.

    Returns:
      A `tasks.Synthetic`.
    """
    from tfamp.recipes.tasks import language_model

    return language_model.synthetic(config)
