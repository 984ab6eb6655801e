"""Says what each precision is on this machine, and why a recipe is not faster.

    python scripts/doctor.py
    python scripts/doctor.py --simulate=a100
    python scripts/doctor.py --config=configs/cnn/digits.py --simulate=v100
    python scripts/doctor.py --output=doctor.md

Nothing is trained, and no data are read: a batch has random content.
"""

import quiet_start  # noqa: F401  Before all that imports TensorFlow.

from tfamp.commands import app, command_flags, doctor

if __name__ == "__main__":
    command_flags.doctor()
    app.run(doctor.run_flags)
