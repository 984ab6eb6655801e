"""Sentiment of tweets (negative, neutral, positive), from local CSV files.

    python scripts/train_bert.py --config=configs/bert/tweets.py --data_dir=FOLDER

FOLDER holds `train.csv` and `test.csv` with columns `text` and `sentiment` (27,480 and
3,534 tweets; Kaggle's "Tweet Sentiment Extraction"). A small encoder is trained from
nothing; a pretrained one wants a smaller step: --preset=PRESET (a KerasHub name,
`hf://...` or a Hugging Face folder) --config.optimizer.learning_rate=1e-4.

Expected with all-MiniLM-L6-v2, that step and --config.limit_examples=4000: test
accuracy 0.773 in float32 and 0.767 in mixed_bfloat16 (one seed each, chance 0.405; 23
tweets are in both files). Time: 3 to 5 minutes for both on 2 cores of an Intel Xeon
with AMX_BF16.
"""

from tfamp.training import bert_config


def get_config():
    """Returns the configuration of the tweets task."""
    config = bert_config.get_csv_config()
    config.name = "bert-tweets"
    config.epochs = 2
    config.data.test_file = "test.csv"
    config.data.label_column = "sentiment"
    config.data.on_bad_rows = "skip"  # The published file has an empty text.
    config.data.sequence_length = 48
    config.model.vocabulary_size = 8192
    return config
