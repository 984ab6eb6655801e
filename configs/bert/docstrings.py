"""Which of four libraries is this docstring from? A small BERT, no download.

RESULTLINE
"""

from tfamp.training import base_config


def get_config():
    """Returns the configuration of the docstrings task."""
    config = base_config.get_config()
    config.name = "bert-docstrings"
    config.task = "text_classification"
    config.epochs = 6
    config.batch_size = 32
    config.optimizer.name = "adamw"
    config.optimizer.learning_rate = 5e-4
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_fraction = 0.1
    config.optimizer.weight_decay = 0.01
    config.optimizer.clip_global_norm = 1.0

    config.data.name = "docstrings"
    config.data.libraries = ("keras", "matplotlib", "sklearn", "tensorflow")
    config.data.texts_per_library = 1800
    config.data.min_words = 8
    config.data.test_fraction = 0.2
    config.data.split_seed = 0
    config.data.sequence_length = 64

    config.model.name = "bert"
    config.model.preset = ""
    config.model.num_layers = 2
    config.model.num_heads = 2
    config.model.hidden_dim = 128
    config.model.intermediate_dim = 512
    config.model.dropout = 0.2
    config.model.max_sequence_length = 64
    config.model.vocabulary_size = 4096

    config.tiny.model = {
        "num_layers": 1,
        "hidden_dim": 32,
        "intermediate_dim": 64,
        "vocabulary_size": 512,
    }
    return config
