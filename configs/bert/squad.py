"""SQuAD 1.1 (find the answer in a paragraph) with BERT-Base, as published.

    python scripts/train_bert.py --config=configs/bert/squad.py --data_dir=FOLDER
    python scripts/train_bert.py --config=configs/bert/squad.py:large --manual_dir=SQUAD
    python scripts/train_bert.py --config=configs/bert/squad.py:tiny --manual_dir=SQUAD

FOLDER holds `squad` as TFDS prepares it; without a network, --manual_dir names the
folder of `train-v1.1.json` and `dev-v1.1.json`, or of others in their format, named by
--config.data.train_file and --config.data.test_file (`--config.data.test_file=` holds
out a fifth of the articles), and --preset=FOLDER takes the weights from a Hugging Face
or KerasHub folder. `--config.model.preset=` takes new weights of the same sizes: enough
to time steps.

`squad.py:base` and `squad.py:large` are meant for a GPU; nothing is recorded here yet.
Batch 12 (large: 24, on a TPU), learning rate 3e-5, 2 epochs, length 384 and stride 128
are the example of https://github.com/google-research/bert#squad-11, which needs 12 GB
in float32. Where 24 windows do not fit, the same updates come from

    --config.batch_size=6 --config.optimizer.accumulation_steps=4

Published on the development set: BERT-Base F1 88.41, exact match 81.25 there; 88.52 and
81.22 by
https://github.com/huggingface/transformers/tree/main/examples/pytorch/question-answering.
BERT-Large F1 90.87, exact match 84.39 there; on 8 A100 F1 90.88 in TF32 and 91.12 in
mixed float16, over 5 seeds 90.84 +- 0.04 and 90.94 +- 0.11 (learning rate 5e-6 and
batch 8 a GPU in its script; batch 38 and 76 a GPU in its table), by
https://github.com/NVIDIA/DeepLearningExamples/tree/master/TensorFlow2/LanguageModeling/BERT.

Differs: Adam here corrects the bias of its averages, Google's does not; the learning
rate has no jump after the warm-up; the n best starts and ends are those of tokens that
an answer may have, Google's of all tokens.

`squad.py:tiny`, for a laptop's CPU: BERT-Tiny's size (2 layers of 128), trained from
nothing, which finds few answers; with its weights: --preset=bert_tiny_en_uncased.
Windows are shorter than the published ones; --config.limit_examples=10000 takes a part
of the questions. No score is published for BERT-Tiny on SQuAD 1.1.
"""

from tfamp.recipes import presets, question_answering


def get_config(size="base"):
    """Returns the configuration; `size` is "base", "large" or "tiny"."""
    config = question_answering.get_config("squad")
    config.name = f"bert-squad_{size}"
    if size == "tiny":
        config.batch_size = 16
        config.epochs = 3
        config.optimizer.learning_rate = 3e-4
        config.data.sequence_length = 192
        config.data.doc_stride = 64
        config.data.max_query_length = 40
        config.model.vocabulary_size = 8192
        return config
    config.batch_size = {"base": 12, "large": 24}[size]
    config.epochs = 2
    config.validation_fraction = 0.0  # As published: the last epoch's weights.
    config.optimizer.learning_rate = 3e-5
    presets.use_published(config, size)
    return config
