"""Which of four libraries is this docstring from? A small BERT, no download.

    python scripts/train_bert.py --config=configs/bert/docstrings.py

Expected: test accuracy 0.791 in float32 and 0.803 in mixed_bfloat16 (one seed, 797
texts, chance 0.38), with matplotlib 3.11.2, scipy 1.17.1, scikit-learn 1.9.1 and
tensorflow 2.21.0; other versions have other docstrings. Time: half a minute to read the
sources and a minute or two for each run, on 2 shared cores of an AMD EPYC with native
bfloat16.
"""

from tfamp.recipes import text_classification


def get_config():
    """Returns the configuration of the docstrings task."""
    config = text_classification.get_config("docstrings")
    config.name = "bert-docstrings"
    config.epochs = 5
    return config
