"""Trains your own task in float32 and in mixed precision, and exports the model.

    python scripts/train.py --config=my_config.py
    python scripts/train.py --config=my_config.py --seeds=3
    python scripts/train.py --config=configs/cnn/digits.py

The configuration's `task` names a function that returns a `tfamp.training.Task`; see
docs/own_task.md. Where tfamp is installed, `tfamp train` is the same command.
"""

import quiet_start  # noqa: F401  Before all that imports TensorFlow.

from tfamp.commands import app, command_flags, train

if __name__ == "__main__":
    command_flags.train(None)
    app.run(train.run_flags)
