"""Which of four libraries is this docstring from? A small BERT, no download.

    python scripts/train_bert.py --config=configs/bert/docstrings.py

Expected over three seeds: test accuracy 0.708 in float32 and 0.714 in mixed_bfloat16,
difference 0.7 points with a deviation of 1.0 (972 texts, chance 0.25; TF-IDF with
logistic regression reaches about 0.77), with matplotlib 3.11.2, scipy 1.17.1,
scikit-learn 1.9.1 and tensorflow 2.21.0; other versions have other docstrings. Time:
10 s to read the sources and a minute for each run, on 2 cores of an AMD EPYC with
native bfloat16.
"""

from tfamp.training import bert_config


def get_config():
    """Returns the configuration of the docstrings task."""
    config = bert_config.get_bert_config()
    config.name = "bert-docstrings"
    config.epochs = 5
    config.data.name = "docstrings"
    config.data.libraries = ("matplotlib", "scipy", "sklearn", "tensorflow")
    config.data.texts_per_library = 2000
    config.data.min_words = 10
    return config
