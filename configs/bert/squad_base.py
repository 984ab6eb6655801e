"""SQuAD 1.1 (find the answer in a paragraph) with BERT-Base, as published.

    python scripts/train_bert.py --config=configs/bert/squad_base.py --data_dir=FOLDER

FOLDER holds `squad` as TFDS prepares it; without a network, `prepare_data.py` writes it
from `train-v1.1.json` and `dev-v1.1.json`, and --preset=FOLDER takes the weights from a
Hugging Face or KerasHub folder. Meant for a GPU; nothing is recorded here yet.

`--config.model.preset=` takes new weights of the same sizes: enough to time steps.

Batch 12, learning rate 3e-5, 2 epochs, length 384 and stride 128 are the example of
https://github.com/google-research/bert#squad-11, which needs 12 GB in float32.

Published there: F1 88.41, exact match 81.25 on the development set. The same by
https://github.com/huggingface/transformers/tree/main/examples/pytorch/question-answering:
88.52 and 81.22.

Differs: Adam here corrects the bias of its averages, Google's does not; the learning
rate has no jump after the warm-up; the n best starts and ends are those of tokens that
an answer may have, Google's of all tokens.
"""

from tfamp.training import bert_config


def get_config():
    """Returns the configuration of SQuAD 1.1 with BERT-Base."""
    config = bert_config.get_squad_config()
    config.name = "bert-squad_base"
    config.batch_size = 12
    config.epochs = 2
    config.validation_fraction = 0.0  # As published: the last epoch's weights.
    config.optimizer.learning_rate = 3e-5
    bert_config.use_published(config, "base")
    return config
