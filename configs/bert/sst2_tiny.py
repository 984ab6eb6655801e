"""SST-2 (sentiment of film review sentences, GLUE) on a laptop's CPU.

    python scripts/train_bert.py --config=configs/bert/sst2_tiny.py --data_dir=FOLDER

FOLDER holds `glue/sst2` as TFDS prepares it; without a network, `prepare_data.py`
writes it from GLUE's TSV files, or from any in their format. Of BERT-Tiny's size (2
layers of 128), trained from nothing; with its weights: --preset=bert_tiny_en_uncased.
--preset=FOLDER takes those of a Hugging Face or KerasHub folder, and an encoder that is
larger wants a smaller step: --config.optimizer.learning_rate=1e-4.

Published for BERT-Tiny: 83.2 on the hidden test set, the best of batches of 8 to 128
and learning rates of 3e-4 to 3e-5 over 4 epochs,
https://github.com/google-research/bert#smaller-bert-models.
"""

from tfamp.training import bert_config


def get_config():
    """Returns the configuration of SST-2 with an encoder of BERT-Tiny's size."""
    config = bert_config.get_glue_config("glue/sst2")
    config.name = "bert-sst2_tiny"
    config.batch_size = 32
    config.epochs = 4
    config.optimizer.learning_rate = 3e-4
    config.data.sequence_length = 64
    config.model.vocabulary_size = 8192
    return config
