"""Trains a network on a table in float32 and in mixed precision, and exports it.

python scripts/train_tabular.py
python scripts/train_tabular.py --config=configs/tabular/bike_sharing.py \\
    --data_dir=FOLDER --job=compare --seeds=3
python scripts/train_tabular.py --config=configs/tabular/rossmann.py --data_dir=FOLDER
python scripts/train_tabular.py --job=train_benchmark --benchmark_batch_sizes=128,1024
"""

import quiet_start  # Before all that imports TensorFlow.

from tfamp.commands import app, command_flags, train

if __name__ == "__main__":
    command_flags.train(f"{quiet_start.CONFIGS}/tabular/diabetes.py")
    app.run(train.run_flags)
