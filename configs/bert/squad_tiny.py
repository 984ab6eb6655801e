"""SQuAD 1.1 (find the answer in a paragraph) on a laptop's CPU.

    python scripts/train_bert.py --config=configs/bert/squad_tiny.py \\
        --data_dir=FOLDER --preset=bert_tiny_en_uncased

FOLDER holds `squad` as TFDS prepares it; without a network, `prepare_data.py` writes it
from files in SQuAD's JSON format, and --preset=FOLDER takes the weights from a Hugging
Face or KerasHub folder. Without a preset an encoder of BERT-Tiny's size (2 layers of
128) is trained from nothing, which finds few answers. Windows are shorter than the
published 384 tokens; --config.limit_examples=10000 takes a part of the questions.

No score is published for BERT-Tiny on SQuAD 1.1.
"""

from tfamp.training import bert_config


def get_config():
    """Returns the configuration of SQuAD with an encoder of BERT-Tiny's size."""
    config = bert_config.get_squad_config()
    config.name = "bert-squad_tiny"
    config.batch_size = 16
    config.epochs = 3
    config.optimizer.learning_rate = 3e-4
    config.data.sequence_length = 192
    config.data.doc_stride = 64
    config.data.max_query_length = 40
    config.model.vocabulary_size = 8192
    return config
