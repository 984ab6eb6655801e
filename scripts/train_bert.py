"""Trains a BERT model in float32 and in mixed precision, and exports it.

    python scripts/train_bert.py
    python scripts/train_bert.py --config=configs/bert/sentences.py \\
        --data_dir=FOLDER --preset=PRESET --seeds=3
    python scripts/train_bert.py --job=train_benchmark --preset=PRESET \\
        --benchmark_batch_sizes=8,32 --benchmark_sequence_lengths=128,384
    python scripts/train_bert.py --job=inference_benchmark --benchmark_jit=on,off

PRESET is a KerasHub name, `hf://...` or a local Hugging Face folder. The benchmarks
time steps on random tokens of full length and need no data.
"""

import quiet_start  # Before all that imports TensorFlow.
from absl import flags

from tfamp.commands import app, command_flags, train


def main():
    """Puts the preset into the configuration and runs the job."""
    if flags.FLAGS.preset:
        config = flags.FLAGS.config
        # Of `--tiny`, too, which has no preset by itself.
        config.model.preset = config.tiny.model.preset = flags.FLAGS.preset
    train.run_flags()


if __name__ == "__main__":
    flags.DEFINE_string("preset", "", "Pretrained weights for the encoder.")
    command_flags.train(f"{quiet_start.CONFIGS}/bert/docstrings.py")
    app.run(main)
