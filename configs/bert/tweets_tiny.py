"""Sentiment of tweets on a laptop's CPU: the first 4,000 of the shuffled training set.

    python scripts/train_bert.py --config=configs/bert/tweets_tiny.py --data_dir=FOLDER

FOLDER holds `train.csv` and `test.csv` with columns `text` and `sentiment`; see
`tweets.py`, which takes them all. An encoder of BERT-Tiny's size (2 layers of 128) is
trained from nothing; a pretrained one wants a smaller step:
--preset=bert_tiny_en_uncased (or `hf://...`, or a Hugging Face or KerasHub folder)
--config.optimizer.learning_rate=1e-4.

Expected without a preset: test accuracy 0.634 in float32 (one seed, chance 0.405).
Time: a minute on 2 shared virtual cores with AMX.
"""

from tfamp.training import bert_config


def get_config():
    """Returns the configuration of the tweets task, made small."""
    config = bert_config.get_csv_config()
    config.name = "bert-tweets_tiny"
    config.epochs = 4
    config.limit_examples = 4000
    config.data.test_file = "test.csv"
    config.data.label_column = "sentiment"
    config.data.on_bad_rows = "skip"  # The published file has an empty text.
    config.data.sequence_length = 48
    return config
