"""MRPC (do two sentences say the same? GLUE) with BERT-Base, as published.

    python scripts/train_bert.py --config=configs/bert/mrpc.py --data_dir=FOLDER
    python scripts/train_bert.py --config=configs/bert/mrpc.py:tiny --manual_dir=MRPC

FOLDER holds `glue/mrpc` as TFDS prepares it; without a network, --manual_dir names the
folder of GLUE's `train.tsv` and `dev.tsv`, or of `msr_paraphrase_train.txt` and
`msr_paraphrase_test.txt`, whose 1,725 test pairs are then scored, and --preset=FOLDER
takes the weights from a Hugging Face or KerasHub folder. `--config.model.preset=` takes
new weights of the same sizes: enough to time steps.

BERT-Base, meant for a GPU; nothing is recorded here yet. Batch 32, learning rate 2e-5,
3 epochs and length 128 are the example of
https://github.com/google-research/bert#sentence-and-sentence-pair-classification-tasks.
Published there: 84.55 accuracy on the 408 development pairs, "between 84% and 88%" over
runs, so compare several seeds: `--seeds=5`. Also: BERT-Large, 10 seeds, 86.72 +- 0.70
in float32 and 86.00 +- 0.80 in mixed float16,
https://github.com/NVIDIA/DeepLearningExamples/tree/master/TensorFlow/LanguageModeling/BERT.
Differs: Adam here corrects the bias of its averages, Google's does not; the learning
rate has no jump after the warm-up.

`mrpc.py:tiny`, for a laptop's CPU: BERT-Tiny's size (2 layers of 128), which wants
pretrained weights, --preset=bert_tiny_en_uncased: 3,668 pairs teach a new one hardly
more than that two thirds of them are paraphrases. Published for BERT-Tiny: F1 81.1,
accuracy 71.1 on the hidden test set, the best of batches of 8 to 128 and learning rates
of 3e-4 to 3e-5 over 4 epochs,
https://github.com/google-research/bert#smaller-bert-models.
"""

from tfamp.recipes import presets, text_classification


def get_config(size="base"):
    """Returns the configuration of MRPC; `size` is "base" or "tiny"."""
    config = text_classification.get_config("glue/mrpc")
    config.name = f"bert-mrpc_{size}"
    if size == "base":
        config.batch_size = 32
        config.epochs = 3
        config.validation_fraction = 0.0  # As published: the last epoch's weights.
        config.optimizer.learning_rate = 2e-5
        presets.use_published(config, "base")
    else:
        config.batch_size = 16
        config.epochs = 4
        config.optimizer.learning_rate = 3e-4
        config.data.sequence_length = 96
    return config
