"""Sentiment of tweets (negative, neutral, positive), from local CSV files.

    python scripts/train_bert.py --config=configs/bert/tweets.py --data_dir=FOLDER
    python scripts/train_bert.py --config=configs/bert/tweets.py:tiny --data_dir=FOLDER

FOLDER holds `train.csv` and `test.csv` with columns `text` and `sentiment` (27,480 and
3,534 tweets; Kaggle's "Tweet Sentiment Extraction",
https://www.kaggle.com/c/tweet-sentiment-extraction). A small encoder is trained from
nothing; a pretrained one wants a smaller step: --preset=PRESET (a KerasHub name,
`hf://...` or a Hugging Face or KerasHub folder) --config.optimizer.learning_rate=1e-4.

Expected with all-MiniLM-L6-v2, that step and --config.limit_examples=4000: test
accuracy 0.775 in float32 and 0.777 in mixed_bfloat16 (one seed, chance 0.405; 23 texts
are in both files). Time: 20 minutes for both on 2 shared cores of an AMD EPYC with
native bfloat16.

`tweets.py:tiny`: the first 4,000 of the shuffled training set, for a laptop's CPU; an
encoder of BERT-Tiny's size (2 layers of 128) is trained from nothing. Expected: test
accuracy 0.638 in float32 and 0.640 in mixed_bfloat16 (one seed).

`tweets.py:base`: BERT-Base, meant for a GPU; nothing is recorded here yet. Batch 32,
learning rate 2e-5 and 3 epochs are within what Devlin et al., "BERT", 2019,
https://arxiv.org/abs/1810.04805, section A.3, recommend for fine-tuning. There is no
published score to compare with: Kaggle's competition scored spans (`tweets_spans.py`).
`--config.model.preset=` takes new weights of the same sizes: enough to time steps.
"""

from tfamp.recipes import presets, text_classification


def get_config(size=""):
    """Returns the configuration of the tweets task; `size` is "", "tiny" or "base"."""
    config = text_classification.get_config("csv")
    config.name = f"bert-tweets_{size}" if size else "bert-tweets"
    config.data.test_file = "test.csv"
    config.data.label_column = "sentiment"
    config.data.on_bad_rows = "skip"  # The published file has an empty text.
    config.data.sequence_length = 48
    if size == "base":
        config.epochs = 3
        config.validation_fraction = 0.0  # The last epoch's weights.
        config.optimizer.learning_rate = 2e-5
        config.data.sequence_length = 128
        presets.use_published(config, "base")
    elif size == "tiny":
        config.epochs = 4
        config.limit_examples = 4000
    else:
        config.epochs = 2
        config.model.vocabulary_size = 8192
    return config
