"""Measures a GPU by one command: `tfamp gpu-report`, and scripts/gpu_plan.py."""

import pathlib
import shlex
import signal
import sys

from absl import flags

from tfamp.commands import app
from tfamp.measuring.device import plan


def run_flags() -> None:
    """Measures, and says where the page is."""
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
