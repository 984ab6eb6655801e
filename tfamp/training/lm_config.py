"""The defaults of `configs/lm/`."""

from ml_collections import config_dict

from tfamp.training import base_config


def get_lm_config() -> config_dict.ConfigDict:
    """Returns the defaults; see `lm.build_model` and `lm_data.load`."""
    config = base_config.get_config()
    config.task = "language_model"
    config.batch_size = 128
    config.eval_batch_size = 128
    config.validation_fraction = 0.05
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_fraction = 0.05
    config.optimizer.clip_global_norm = 1.0
    config.data.unit = "wordpiece"  # Or "character".
    config.data.sequence_length = 32  # Tokens that the state is carried over.
    config.data.test_fraction = 0.05
    config.model.name = "lstm"
    # Most tokens of a trained WordPiece tokenizer; characters are as many as there are.
    config.model.vocabulary_size = 8192
    config.model.embedding_dim = 128
    config.model.units = (128,)  # Of each LSTM layer.
    config.model.dropout = 0.2
    # True: the product with the vocabulary is in float32, too, not only the softmax.
    config.model.float32_head = False
    # True: the time steps are laid out in the graph instead of in a loop.
    config.model.unroll = False
    config.tiny.data = {"sequence_length": 8}
    config.tiny.model = {"vocabulary_size": 512, "embedding_dim": 16, "units": (16,)}
    return config


def get_docstrings_config() -> config_dict.ConfigDict:
    """Returns the defaults of text from installed packages; see `docstrings`."""
    config = get_lm_config()
    config.data.name = "docstrings"
    config.data.libraries = (
        *("keras", "matplotlib", "numpy", "scipy", "sklearn", "tensorflow"),
    )
    config.data.texts_per_library = 100_000  # All there are.
    config.data.min_words = 8
    config.data.split_seed = 0
    config.tiny.data = {"sequence_length": 8, "libraries": ("keras",)}
    return config


def get_text_file_config() -> config_dict.ConfigDict:
    """Returns the defaults of local text files."""
    config = get_lm_config()
    config.data.name = "text_file"
    config.data.text_files = "*.txt"  # In --data_dir; a name, or a pattern of several.
    return config
