"""Measures a GPU by one command: `tfamp gpu-report`, and scripts/gpu_plan.py."""

import pathlib
import signal

from absl import flags

from tfamp import progress
from tfamp.commands import app
from tfamp.measuring.device import plan


def run_flags() -> None:
    """Measures, and says where the page is."""
    # As Ctrl-C: what it started ends, and the page is written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    values = flags.FLAGS
    arguments = values.parts, values.minutes, values.tiny, values.torch_python
    folder = pathlib.Path(values.output).absolute()
    device_folder = plan.run(folder, *arguments, app.typed(), progress.say)
    progress.say(f"send {device_folder / 'report.json'}")
