"""MRPC (do two sentences say the same? GLUE) on a laptop's CPU.

    python scripts/train_bert.py --config=configs/bert/mrpc_tiny.py --data_dir=FOLDER \\
        --preset=bert_tiny_en_uncased

FOLDER holds `glue/mrpc` as TFDS prepares it; without a network, `prepare_data.py`
writes it from the original files, and --preset=FOLDER takes the weights from a Hugging
Face or KerasHub folder. Without a preset an encoder of BERT-Tiny's size (2 layers of
128) is trained from nothing: 3,668 pairs teach it hardly more than that two thirds of
them are paraphrases.

Published for BERT-Tiny: F1 81.1, accuracy 71.1 on the hidden test set, the best of
batches of 8 to 128 and learning rates of 3e-4 to 3e-5 over 4 epochs,
https://github.com/google-research/bert#smaller-bert-models.
"""

from tfamp.training import bert_config


def get_config():
    """Returns the configuration of MRPC with an encoder of BERT-Tiny's size."""
    config = bert_config.get_glue_config("glue/mrpc")
    config.name = "bert-mrpc_tiny"
    config.batch_size = 16
    config.epochs = 4
    config.optimizer.learning_rate = 3e-4
    config.data.sequence_length = 96
    return config
