"""Which of four libraries is this docstring from? A small BERT, no download.

    python scripts/train_bert.py --config=configs/bert/docstrings.py

EXPECTED
"""

from tfamp.training.tasks import text_classification


def get_config():
    """Returns the configuration of the docstrings task."""
    config = text_classification.get_config("docstrings")
    config.name = "bert-docstrings"
    config.epochs = 5
    return config
