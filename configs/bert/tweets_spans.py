"""Which words of a tweet carry its sentiment? Spans from a local CSV file.

    python scripts/train_bert.py --config=configs/bert/tweets_spans.py \\
        --data_dir=FOLDER --preset=PRESET

FOLDER holds the `train.csv` of Kaggle's "Tweet Sentiment Extraction" with columns
`text`, `sentiment` and `selected_text`,
https://www.kaggle.com/c/tweet-sentiment-extraction; a fifth is held out and scored by
the word-level Jaccard index, as there. The sentiment is the question, the tweet the
context. PRESET is a KerasHub name, `hf://...`, or a Hugging Face or KerasHub folder;
without it an encoder of BERT-Tiny's size (2 layers of 128) is trained from nothing.
Rows whose `selected_text` is not in the text are left out and counted.

Published: 0.716 on Kaggle's hidden test set by RoBERTa with post-processing,
https://www.cwthompson.com/projects/twitter-sentiment. Nothing is recorded here yet.
"""

from tfamp.recipes import question_answering


def get_config():
    """Returns the configuration of the tweets' spans."""
    config = question_answering.get_config("csv")
    config.name = "bert-tweets_spans"
    config.batch_size = 32
    config.epochs = 3
    config.optimizer.learning_rate = 1e-4
    config.data.on_bad_rows = "skip"
    config.data.sequence_length = 96
    config.data.doc_stride = 48
    config.data.max_query_length = 8
    config.data.max_answer_length = 96  # Of a neutral tweet, often all of it.
    config.model.max_sequence_length = 128
    config.model.vocabulary_size = 8192
    return config
