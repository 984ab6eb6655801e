"""Trains a network on a table in float32 and in mixed precision, and exports it.

python scripts/train_tabular.py
python scripts/train_tabular.py --config=configs/tabular/bike_sharing.py \\
    --data_dir=FOLDER --job=compare --seeds=3
python scripts/train_tabular.py --config=configs/tabular/rossmann.py --data_dir=FOLDER
python scripts/train_tabular.py --job=train_benchmark --benchmark_batch_sizes=128,1024
"""

import pathlib

import quiet_start  # noqa: F401  Before all that imports TensorFlow.

from tfamp.benchmark import jobs
from tfamp.training import app

CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "tabular" / "diabetes.py"

if __name__ == "__main__":
    app.define_flags(str(CONFIG), jobs)
    app.run()
