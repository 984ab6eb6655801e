"""Trains a recurrent language model in float32 and in mixed precision.

By default on the docstrings of installed packages, in float16 with and without loss
scaling.

python scripts/train_lm.py
python scripts/train_lm.py --config=configs/lm/text_file.py --data_dir=FOLDER
python scripts/train_lm.py --config.precision.mode=mixed_bfloat16 --job=train
python scripts/train_lm.py --job=train_benchmark --benchmark_batch_sizes=32,128
"""

import quiet_start  # Before all that imports TensorFlow.

from tfamp.commands import app, command_flags, train

if __name__ == "__main__":
    command_flags.train(f"{quiet_start.CONFIGS}/lm/docstrings.py")
    app.run(train.run_flags)
