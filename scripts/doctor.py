"""Says what each precision is on this machine, and why a recipe is not faster.

    python scripts/doctor.py
    python scripts/doctor.py --simulate=a100
    python scripts/doctor.py --config=configs/cnn/digits.py --simulate=v100
    python scripts/doctor.py --output=doctor.md

Nothing is trained, and no data are read: a batch has random content.
"""

import json
import pathlib

import quiet_start  # noqa: F401  Before all that imports TensorFlow.
from absl import flags

from tfamp.diagnostics import doctor as machine_doctor
from tfamp.training import app, doctor


def main(argv):
    """Prints the report, and writes it if a file is named."""
    del argv
    values = flags.FLAGS
    config, mode, audit = values.config, "", None
    report = machine = machine_doctor.describe(values.simulate)
    if config is not None:
        mode, audit = doctor.audit_recipe(config, values.simulate)
        report = f"Mode of the recipe: {mode}\n{audit}"
    if values.output.endswith(".json"):
        content = {"machine": machine.to_dict(), "mode": mode}
        content["audit"] = audit and audit.to_dict()
        pathlib.Path(values.output).write_text(json.dumps(content, indent=2) + "\n")
    elif values.output:
        text = machine.to_markdown()
        if audit:
            text += f"\nMode of the recipe: {mode}\n\n{audit.to_markdown()}"
        pathlib.Path(values.output).write_text(text)
    print(report)


if __name__ == "__main__":
    app.define_config(None)
    flags.DEFINE_string("simulate", None, "Decide for another device, such as a100.")
    flags.DEFINE_string("output", "", "File for the report: .json, else Markdown.")
    app.run(main)
