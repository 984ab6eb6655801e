"""Sentiment of review sentences (IMDb, Amazon, Yelp), from local tab-separated files.

    python scripts/train_bert.py --config=configs/bert/sentences.py \\
        --data_dir=FOLDER --preset=PRESET

FOLDER holds the three `*_labelled.txt` of the UCI "Sentiment Labelled Sentences"; 20 %
are the test split. PRESET is a KerasHub name, `hf://...` or a Hugging Face folder;
without it a small encoder is trained from nothing, which learns little from 2,162
sentences.

Expected with all-MiniLM-L6-v2: test accuracy 0.928 in float32 and 0.927 in
mixed_bfloat16 (one seed each, 600 sentences, chance 0.52). Time: 7 minutes on 2 cores
of an AMD EPYC shared with other jobs.
"""

from tfamp.training import base_config


def get_config():
    """Returns the configuration of the sentences task."""
    config = base_config.get_config()
    config.name = "bert-sentences"
    config.task = "text_classification"
    config.epochs = 3
    config.batch_size = 32
    config.optimizer.name = "adamw"
    config.optimizer.learning_rate = 1e-4
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_fraction = 0.1
    config.optimizer.weight_decay = 0.01
    config.optimizer.clip_global_norm = 1.0

    config.data.name = "csv"
    config.data.train_file = "*_labelled.txt"  # IMDb, Amazon and Yelp.
    config.data.test_file = ""
    config.data.test_fraction = 0.2
    config.data.text_column = "0"  # Positions: the files have no header.
    config.data.label_column = "1"
    config.data.delimiter = "\t"
    config.data.header = False
    config.data.quoted = False
    config.data.on_bad_rows = "raise"
    config.data.split_seed = 0
    config.data.sequence_length = 48

    # The sizes are those of a new encoder; --preset brings its own.
    config.model.name = "bert"
    config.model.preset = ""
    config.model.num_layers = 2
    config.model.num_heads = 2
    config.model.hidden_dim = 128
    config.model.intermediate_dim = 512
    config.model.dropout = 0.1
    config.model.max_sequence_length = 48
    config.model.vocabulary_size = 4096

    config.tiny.model = {
        "num_layers": 1,
        "hidden_dim": 32,
        "intermediate_dim": 64,
        "vocabulary_size": 512,
    }
    return config
