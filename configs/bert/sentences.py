"""Sentiment of review sentences (IMDb, Amazon, Yelp), from local tab-separated files.

    python scripts/train_bert.py --config=configs/bert/sentences.py \\
        --data_dir=FOLDER --preset=PRESET

FOLDER holds the three `*_labelled.txt` of the UCI "Sentiment Labelled Sentences"; 20 %
are the test split. PRESET is a KerasHub name, `hf://...` or a Hugging Face folder;
without it a small encoder is trained from nothing, which learns little from 2,162
sentences.

Expected with all-MiniLM-L6-v2: test accuracy 0.918 in float32 and 0.926 in
mixed_bfloat16, means of two seeds (598 sentences, standard error 0.01, chance 0.51).
Time: 4 to 7 minutes a run on 2 shared cores of an AMD EPYC with native bfloat16.
"""

from tfamp.recipes import text_classification


def get_config():
    """Returns the configuration of the sentences task."""
    config = text_classification.get_config("csv")
    config.name = "bert-sentences"
    config.optimizer.learning_rate = 2e-4
    config.data.train_file = "*_labelled.txt"  # IMDb, Amazon and Yelp.
    config.data.text_column = "0"  # Positions: the files have no header.
    config.data.label_column = "1"
    config.data.delimiter = "\t"
    config.data.header = False
    config.data.quoted = False
    config.data.sequence_length = 48
    config.model.pooling = "mean"  # As the sentence encoders were trained.
    return config
