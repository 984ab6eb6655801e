"""Trains a U-Net in float32 and in mixed precision, and exports it for serving.

python scripts/train_unet.py
python scripts/train_unet.py --config=configs/unet/dsb2018.py --data_dir=FOLDER
python scripts/train_unet.py --config.precision.mode=mixed_float16 --job=train
python scripts/train_unet.py --job=train_benchmark --benchmark_batch_sizes=8,32
"""

import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Read when TensorFlow starts.

from tfamp.benchmark import jobs  # noqa: E402
from tfamp.training import app  # noqa: E402

ROOT = pathlib.Path(__file__).parents[1]

if __name__ == "__main__":
    app.define_flags(str(ROOT / "configs/unet/digits_on_photographs.py"), jobs)
    app.run()
