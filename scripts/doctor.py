"""Says what each precision is on this machine, and why a recipe is not faster.

    python scripts/doctor.py
    python scripts/doctor.py --simulate=a100
    python scripts/doctor.py --config=configs/cnn/digits.py --simulate=v100
    python scripts/doctor.py --output=doctor.md

Nothing is trained. Data that a recipe lacks are prepared as for its training.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Read when TensorFlow starts.

from absl import flags  # noqa: E402
from ml_collections import config_flags  # noqa: E402

from tfamp import device_table  # noqa: E402
from tfamp.training import app, doctor  # noqa: E402


def main(argv):
    """Prints the report, and writes it if a file is named."""
    del argv
    values = flags.FLAGS
    config = values.config
    if values.output:
        doctor.check_output(values.output)
    if values.data_dir:
        if config is None:
            raise ValueError(
                "--data_dir is where a recipe's data are. Received: "
                f"--data_dir={values.data_dir} without --config. Pass --config, too."
            )
        with config.unlocked():
            config.data_dir = os.path.abspath(values.data_dir)
    result = doctor.report(config, values.simulate, values.time)
    if values.output:
        doctor.write(result, values.output)
    print(result)


if __name__ == "__main__":
    config_flags.DEFINE_config_file(
        "config", None, "A recipe to audit.", lock_config=True
    )
    flags.DEFINE_enum(
        "simulate", None, list(device_table.DEVICES), "Decide for another device."
    )
    flags.DEFINE_bool("time", False, "Time the recipe's input against its step.")
    flags.DEFINE_string("data_dir", "", "Folder of prepared (TFDS) or local data.")
    flags.DEFINE_string("output", "", "File for the report: .json, else Markdown.")
    app.run(main)
