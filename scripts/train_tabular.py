"""Trains a network on a table in float32 and in mixed precision, and exports it.

python scripts/train_tabular.py
python scripts/train_tabular.py --config=configs/tabular/bike_sharing.py \\
    --data_dir=FOLDER --job=compare --seeds=3
python scripts/train_tabular.py --config=configs/tabular/rossmann.py --data_dir=FOLDER
python scripts/train_tabular.py --job=train_benchmark --benchmark_batch_sizes=128,1024
"""

import quiet_start  # Before all that imports TensorFlow.

from tfamp.commands import train

if __name__ == "__main__":
    train.define_flags(f"{quiet_start.CONFIGS}/tabular/diabetes.py")
    train.run()
