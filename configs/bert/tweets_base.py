"""Sentiment of tweets (negative, neutral, positive) with BERT-Base, local CSV files.

    python scripts/train_bert.py --config=configs/bert/tweets_base.py --data_dir=FOLDER

FOLDER holds `train.csv` and `test.csv` with columns `text` and `sentiment` (27,480 and
3,534 tweets; Kaggle's "Tweet Sentiment Extraction",
https://www.kaggle.com/c/tweet-sentiment-extraction). Without a network, --preset=FOLDER
takes the weights from a Hugging Face or KerasHub folder. Meant for a GPU; nothing is
recorded here yet.

`--config.model.preset=` takes new weights of the same sizes: enough to time steps.

Batch 32, learning rate 2e-5 and 3 epochs are within what Devlin et al., "BERT", 2019,
https://arxiv.org/abs/1810.04805, section A.3, recommend for fine-tuning. There is no
published score to compare with: Kaggle's competition scored spans (`tweets_spans.py`).
"""

from tfamp.training import bert_config


def get_config():
    """Returns the configuration of the tweets task with BERT-Base."""
    config = bert_config.get_csv_config()
    config.name = "bert-tweets_base"
    config.batch_size = 32
    config.epochs = 3
    config.validation_fraction = 0.0  # The last epoch's weights.
    config.optimizer.learning_rate = 2e-5
    config.data.test_file = "test.csv"
    config.data.label_column = "sentiment"
    config.data.on_bad_rows = "skip"  # The published file has an empty text.
    config.data.sequence_length = 128
    bert_config.use_published(config, "base")
    return config
