"""Trains a CNN in float32 and in mixed precision, and exports it for serving.

python scripts/train_cnn.py
python scripts/train_cnn.py --config=configs/cnn/mnist.py --job=compare
python scripts/train_cnn.py --config.precision.mode=mixed_float16 --job=train
python scripts/train_cnn.py --job=train_benchmark --benchmark_batch_sizes=32,256
python scripts/train_cnn.py --find_batch_size --memory_limit_mb=1500
"""

import quiet_start  # Before all that imports TensorFlow.

from tfamp.commands import app, command_flags, train

if __name__ == "__main__":
    command_flags.train(f"{quiet_start.CONFIGS}/cnn/digits.py")
    app.run(train.run_flags)
