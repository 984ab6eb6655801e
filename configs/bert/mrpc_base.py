"""MRPC (do two sentences say the same? GLUE) with BERT-Base, as published.

    python scripts/train_bert.py --config=configs/bert/mrpc_base.py --data_dir=FOLDER

FOLDER holds `glue/mrpc` as TFDS prepares it; without a network, `prepare_data.py`
writes it from the original files, and --preset=FOLDER takes the weights from a Hugging
Face or KerasHub folder. Meant for a GPU; nothing is recorded here yet.

`--config.model.preset=` takes new weights of the same sizes: enough to time steps.

Batch 32, learning rate 2e-5, 3 epochs and length 128 are the example of
https://github.com/google-research/bert#sentence-and-sentence-pair-classification-tasks.

Published there: 84.55 accuracy on the 408 development pairs, "between 84% and 88%" over
runs, so compare several seeds: `--seeds=5`. Also: BERT-Large, 10 seeds, 86.72 +- 0.70
in float32 and 86.00 +- 0.80 in mixed float16,
https://github.com/NVIDIA/DeepLearningExamples/tree/master/TensorFlow/LanguageModeling/BERT.

Differs: Adam here corrects the bias of its averages, Google's does not; the learning
rate has no jump after the warm-up.
"""

from tfamp.training import bert_config


def get_config():
    """Returns the configuration of MRPC with BERT-Base."""
    config = bert_config.get_glue_config("glue/mrpc")
    config.name = "bert-mrpc_base"
    config.batch_size = 32
    config.epochs = 3
    config.validation_fraction = 0.0  # As published: the last epoch's weights.
    config.optimizer.learning_rate = 2e-5
    bert_config.use_published(config, "base")
    return config
