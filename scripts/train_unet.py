"""Trains a U-Net in float32 and in mixed precision, and exports it for serving.

python scripts/train_unet.py
python scripts/train_unet.py --config=configs/unet/dsb2018.py --data_dir=FOLDER
python scripts/train_unet.py --config.precision.mode=mixed_float16 --job=train
python scripts/train_unet.py --job=train_benchmark --benchmark_batch_sizes=8,32
"""

import quiet_start  # Before all that imports TensorFlow.

from tfamp.commands import app, command_flags, train

if __name__ == "__main__":
    command_flags.train(f"{quiet_start.CONFIGS}/unet/digits_on_photographs.py")
    app.run(train.run_flags)
