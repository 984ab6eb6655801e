"""Measures a GPU by one command: `tfamp gpu-report`, and scripts/gpu_plan.py."""

import pathlib
import shlex
import signal
import sys

from absl import flags

from tfamp.commands import app
from tfamp.measuring.device import parts, plan


def define_flags() -> None:
    """Defines the flags of the command."""
    names = [*parts.PARTS]
    flags.DEFINE_string(
        "output",
        "runs/gpu_report",
        "Folder of the results; a device has its own in it.",
    )
    flags.DEFINE_float(
        "minutes", 12, "Time limit of all parts together.", lower_bound=0
    )
    flags.DEFINE_list("parts", names, f"What to measure: {', '.join(names)}.")
    flags.DEFINE_bool("tiny", False, "Run small models, on any device, as a check.")
    flags.DEFINE_string(
        "torch_python", "", "Command of a Python with PyTorch; default: this Python."
    )
    app.show_in_help(__name__, app.__name__)


def run() -> None:
    """Parses the flags, measures, and says where the page is."""
    app.run(lambda argv: _run_flags())


def _run_flags():
    # As Ctrl-C: what it started ends, and the page is written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    values = flags.FLAGS
    arguments = values.parts, values.minutes, values.tiny, values.torch_python
    name = pathlib.Path(sys.argv[0])
    script = f"python {name}" if name.suffix == ".py" else str(name)
    command = f"{script} {shlex.join(sys.argv[1:])}".strip()
    folder = pathlib.Path(values.output).absolute()
    device_folder = plan.run(folder, *arguments, command, app.say)
    app.say(f"send {device_folder / 'report.json'}")
