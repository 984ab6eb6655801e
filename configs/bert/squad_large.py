"""SQuAD 1.1 (find the answer in a paragraph) with BERT-Large, as published.

    python scripts/train_bert.py --config=configs/bert/squad_large.py --data_dir=FOLDER

Data and weights: see `squad_base.py`. Meant for a GPU; nothing is recorded here yet.
Where 24 windows of 384 tokens do not fit, the same updates come from

    --config.batch_size=6 --config.optimizer.accumulation_steps=4

Batch 24, learning rate 3e-5 and 2 epochs are those of
https://github.com/google-research/bert#squad-11 (on a TPU).

Published there: F1 90.87, exact match 84.39 on the development set. By
https://github.com/NVIDIA/DeepLearningExamples/tree/master/TensorFlow2/LanguageModeling/BERT
on 8 A100: F1 90.88 in TF32 and 91.12 in mixed float16; over 5 seeds 90.84 +- 0.04 and
90.94 +- 0.11 (learning rate 5e-6 and batch 8 a GPU in its script; batch 38 and 76 a GPU
in its table).

Differs: Adam here corrects the bias of its averages, Google's does not; the learning
rate has no jump after the warm-up; the n best starts and ends are those of tokens that
an answer may have, Google's of all tokens.
"""

from tfamp.training import bert_config


def get_config():
    """Returns the configuration of SQuAD 1.1 with BERT-Large."""
    config = bert_config.get_squad_config()
    config.name = "bert-squad_large"
    config.batch_size = 24
    config.epochs = 2
    config.validation_fraction = 0.0  # As published: the last epoch's weights.
    config.optimizer.learning_rate = 3e-5
    bert_config.use_published(config, "large")
    return config
