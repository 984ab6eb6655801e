"""The configurations that the files in `configs/bert/` start from."""

from ml_collections import config_dict

from tfamp.training import base_config


def get_bert_config() -> config_dict.ConfigDict:
    """Returns the defaults of text classification; see `bert.create`.

    The recipe is that of fine-tuning in Devlin et al., "BERT", 2019: AdamW, linear
    warm-up over the first tenth and decay, gradients clipped at norm 1. XLA is left to
    Keras (`jit_compile=None`): on where there is a GPU, off on a CPU, where it would
    compute bfloat16 in float32.
    """
    config = base_config.get_config()
    config.task = "text_classification"
    config.optimizer.name = "adamw"
    config.optimizer.learning_rate = 5e-4
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_fraction = 0.1
    config.optimizer.epsilon = 1e-6
    config.optimizer.weight_decay = 0.01
    config.optimizer.clip_global_norm = 1.0
    config.data.split_seed = 0
    config.data.test_fraction = 0.2  # Unused where there is test data.
    config.data.sequence_length = 64
    config.data.on_bad_rows = "raise"  # Or "skip": left out and counted.
    # Folder for the token ids of large corpora; "": the user's cache folder (see
    # `token_cache.find_folder`), "off": none.
    config.data.token_cache = ""
    # Columns of text in TFDS data that is not of GLUE; see `get_csv_config`.
    config.data.text_column = "text"
    config.data.second_text_column = ""
    config.data.label_column = "label"
    config.model.name = "bert"
    config.model.pooling = "cls"  # Or "mean": see `bert.build_model`.
    # Pretrained weights; the sizes below are those of a new encoder.
    config.model.preset = ""
    config.model.num_layers = 2
    config.model.num_heads = 2
    config.model.hidden_dim = 128
    config.model.intermediate_dim = 512
    config.model.dropout = 0.1
    config.model.max_sequence_length = 64
    config.model.vocabulary_size = 4096
    config.tiny.model = {
        "preset": "",
        "num_layers": 1,
        "num_heads": 2,
        "hidden_dim": 32,
        "intermediate_dim": 64,
        "vocabulary_size": 512,
    }
    return config


def get_csv_config() -> config_dict.ConfigDict:
    """Returns the defaults of text in local CSV or TSV files; see `text.load_csv`."""
    config = get_bert_config()
    config.data.name = "csv"
    _add_files(config)
    return config


def get_glue_config(name: str) -> config_dict.ConfigDict:
    """Returns the defaults of a GLUE task from TFDS; see `glue.load`.

    Args:
      name: Name in TFDS, e.g. "glue/sst2".
    """
    config = get_bert_config()
    config.data.name = name
    config.data.sequence_length = 128
    config.model.max_sequence_length = 128
    config.tiny.data = {"sequence_length": 32}
    return config


def get_squad_config() -> config_dict.ConfigDict:
    """Returns the defaults of extractive questions; see `question_answering.create`.

    Lengths are those of Google's `run_squad.py`
    (https://github.com/google-research/bert).
    """
    config = get_bert_config()
    config.task = "question_answering"
    # Position accuracy also counts windows without the answer: it selects poorly.
    config.validation_fraction = 0.0
    config.eval_batch_size = 32
    config.data.name = "squad"
    config.data.sequence_length = 384
    config.data.doc_stride = 128  # Tokens from one window's start to the next.
    config.data.max_query_length = 64  # Tokens of the question.
    config.data.max_answer_length = 30  # Tokens of a predicted answer.
    config.data.n_best_size = 20  # Starts, ends and answers that are considered.
    config.model.max_sequence_length = 384
    for name in ("text_column", "second_text_column", "label_column"):
        del config.data[name]  # Of text classification alone, as is the next.
    del config.model.pooling
    config.tiny.data = {"sequence_length": 64, "doc_stride": 32, "max_query_length": 16}
    return config


def get_span_csv_config() -> config_dict.ConfigDict:
    """Returns the defaults of spans in local CSV files; see `squad_splits.load_csv`."""
    config = get_squad_config()
    config.data.name = "csv"
    _add_files(config)
    config.data.context_column = "text"
    config.data.question_column = "sentiment"
    config.data.answer_column = "selected_text"
    return config


def _add_files(config):
    """Adds what says how local files are read."""
    config.data.train_file = "train.csv"
    config.data.test_file = ""  # "": a share of the training file is held out.
    config.data.delimiter = ","
    config.data.header = True
    config.data.quoted = True


# Layers, heads, hidden and intermediate sizes of Devlin et al., "BERT", 2019.
_PUBLISHED = {"base": (12, 12, 768, 3072), "large": (24, 16, 1024, 4096)}


def use_published(config: config_dict.ConfigDict, size: str) -> None:
    """Sets the uncased English weights of a size, and the sizes of a new encoder to it.

    So that `--config.model.preset=` means the same shapes with new weights.

    Args:
      config: Changed in place.
      size: "base" or "large".
    """
    model = config.model
    model.preset = f"bert_{size}_en_uncased"
    model.num_layers, model.num_heads, *widths = _PUBLISHED[size]
    model.hidden_dim, model.intermediate_dim = widths
    model.max_sequence_length, model.vocabulary_size = 512, 30522
