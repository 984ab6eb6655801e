"""The command line of the benchmark."""

import os
import pathlib
import shlex
import sys

from absl import flags
from ml_collections import config_flags

from tfamp.commands import app
from tfamp.measuring import cells, runner
from tfamp.runs import run_files


def define_flags(default_config: str) -> None:
    """Defines the flags of the script.

    Args:
      default_config: Path of the default configuration.
    """
    app.define_config(default_config)
    flags.DEFINE_string(
        "workdir",
        None,
        "Folder of the results; default: runs/NAME-HASH of the settings.",
    )
    flags.DEFINE_string(
        "workload",
        "",
        "Function to measure instead of the configuration's tasks, 'module:function' "
        "or 'file.py:function'. It returns a compiled Keras model and a "
        "tf.data.Dataset of batches.",
    )
    flags.DEFINE_list(
        "modes", [], "Precision modes; default: those that this device has units for."
    )
    flags.DEFINE_list("tasks", [], "Names of tasks to time; default: all.")
    flags.DEFINE_bool("tiny", False, "Run for a few seconds, as a check.")
    flags.DEFINE_bool("overwrite", False, "Delete the contents of the folder first.")
    app.show_in_help(__name__, app.__name__)


def run() -> None:
    """Parses the flags, runs the benchmark, prints its tables."""
    app.run(lambda argv: _run_flags())


def _run_flags():
    values = flags.FLAGS
    config = values.config
    if not {"tasks", "time_to_accuracy"} <= set(config):
        raise ValueError(
            "--config must name a benchmark's configuration, with `tasks`. Received: "
            f"a configuration with {', '.join(sorted(config))}. To measure a training "
            "configuration, name it in a file like configs/benchmark/quick.py."
        )
    if values.workload:
        _measure_own(config, values.workload)
    elif not config.tasks and not config.time_to_accuracy:
        raise ValueError("Nothing to measure: pass --workload=module:function.")
    if values.tiny:
        config = cells.apply_tiny(config)
        flag_values = config_flags.get_override_values(flags.FLAGS["config"])
        config.update_from_flattened_dict(flag_values)  # Flags win.
    for task in config.tasks.values() if values.modes else ():
        task.modes = tuple(values.modes)
    _keep_tasks(config, values.tasks)
    cells.plan(config)
    folder = pathlib.Path(values.workdir or app.default_workdir(cells.identity(config)))
    if values.overwrite:
        run_files.delete_run(folder)
    app.say(f"working directory: {folder}")
    script = sys.argv[0]  # Or `tfamp benchmark`.
    if os.path.isfile(script):
        script = f"python {os.path.relpath(script)}"
    command = f"{script} {shlex.join(sys.argv[1:])}".rstrip()
    report = runner.run(config, folder, command=command)
    sys.stdout.write(report.to_markdown())
    app.say(f"open {folder / 'report.html'} in a browser")
    report.check(folder)


def _measure_own(config, workload):
    """Puts a user's function in the place of the tasks."""
    task = cells.get_task(workload)
    with config.unlocked():
        config.name = task.function.rpartition(":")[2]
        config.tasks, config.time_to_accuracy = {config.name: task}, {}


def _keep_tasks(config, names):
    """Drops the tasks that were not requested."""
    tasks = {*config.tasks, *config.time_to_accuracy}
    if set(names) - tasks:
        raise ValueError(
            f"Unknown tasks. Received: --tasks={','.join(names)}. Expected some of "
            f"{', '.join(sorted(tasks))}."
        )
    for part in (config.tasks, config.time_to_accuracy) if names else ():
        with part.unlocked():
            for name in set(part) - set(names):
                del part[name]
