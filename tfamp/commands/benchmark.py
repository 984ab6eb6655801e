"""The command line of the benchmark."""

import pathlib
import sys

from absl import flags
from ml_collections import config_flags

from tfamp import progress
from tfamp.commands import app
from tfamp.measuring.benchmark import cells, runner
from tfamp.runs import run_files


def run_flags() -> None:
    """Runs the benchmark that the flags describe, and prints its tables."""
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
    if values.tiny:
        config = cells.apply_tiny(config)
        flag_values = config_flags.get_override_values(flags.FLAGS["config"])
        config.update_from_flattened_dict(flag_values)  # Flags win.
    for task in config.tasks.values() if values.modes else ():
        task.modes = tuple(values.modes)
    _keep_tasks(config, values.tasks)
    cells.plan(config)
    folder = pathlib.Path(
        values.workdir or run_files.default_workdir(cells.identity(config))
    )
    if values.overwrite:
        run_files.delete_run(folder)
    progress.say(f"working directory: {folder}")
    report = runner.run(config, folder, command=app.typed())
    sys.stdout.write(report.to_markdown())
    progress.say(f"open {folder / 'report.html'} in a browser")


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
