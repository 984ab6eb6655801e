"""The command line of the benchmark."""

import os
import pathlib
import shlex
import sys

from absl import flags
from ml_collections import config_flags

from tfamp import errors
from tfamp.benchmark import browser, plan, report_files, suite, suite_config
from tfamp.training import app, run_files

_WINDOW = 1280, 2400  # Pixels of the screenshot.


def define_flags(default_config: str) -> None:
    """Defines the flags of the script.

    Args:
      default_config: Path of the default configuration.
    """
    app.define_config(default_config)
    flags.DEFINE_string(
        "workdir", None, "Folder; default: runs/NAME-HASH of the settings."
    )
    flags.DEFINE_list("tasks", [], "Names of tasks to time; default: all.")
    flags.DEFINE_bool("tiny", False, "A run of seconds, to see that all works.")
    flags.DEFINE_bool("overwrite", False, "Delete what is in the folder first.")
    flags.DEFINE_bool(
        "screenshot", False, "Take a picture of the page, by headless Chromium."
    )
    app.show_in_help(__name__, app.__name__)


def run() -> None:
    """Parses the flags, runs the benchmark, prints its tables."""
    app.run(lambda argv: _run_flags())


def _run_flags():
    values = flags.FLAGS
    config = values.config
    _check_kind(config)
    if values.tiny:
        config = suite_config.apply_tiny(config)
        given = config_flags.get_override_values(flags.FLAGS["config"])
        config.update_from_flattened_dict(given)  # What was asked for wins.
    _keep_tasks(config, values.tasks)
    plan.make(config)
    suite.plan_accuracy(config)
    if values.screenshot:
        browser.require()  # Now, not after all was measured.
    folder = pathlib.Path(
        values.workdir or app.default_workdir(suite_config.identity(config))
    )
    if values.overwrite:
        run_files.delete_run(folder)
    app.say(f"working directory: {folder}")
    made = suite.run(config, folder, report=app.say, command=_command())
    sys.stdout.write((folder / report_files.MARKDOWN).read_text())
    page = folder / report_files.PAGE
    app.say(f"open {page} in a browser")
    if values.screenshot:
        browser.screenshot(page, folder / report_files.SCREENSHOT, *_WINDOW)
    if made.rows and all(row.failed for row in made.rows):
        raise errors.RunError(
            f"Every cell of the benchmark failed, see {folder}/{report_files.PAGE}. "
            f"Received of the first: {made.rows[0].failed}"
        )


def _check_kind(config):
    """Refuses the configuration of a training run."""
    if not {"tasks", "time_to_accuracy"} <= set(config):
        raise ValueError(
            "--config must name a benchmark's configuration, with `tasks`. Received "
            f"one with {', '.join(sorted(config))}. To measure a training "
            "configuration, name it in a file like configs/benchmark/quick.py."
        )


def _keep_tasks(config, names):
    """Drops the tasks that were not asked for."""
    unknown = set(names) - set(config.tasks) - set(config.time_to_accuracy)
    if unknown:
        known = sorted({*config.tasks, *config.time_to_accuracy})
        raise ValueError(
            f"Unknown tasks. Received: --tasks={','.join(names)}. Expected some of "
            f"{', '.join(known)}."
        )
    for part in (config.tasks, config.time_to_accuracy) if names else ():
        with part.unlocked():
            for name in set(part) - set(names):
                del part[name]


def _command():
    """What the user typed, without the folders of the interpreter."""
    script = os.path.relpath(sys.argv[0])
    return shlex.join(["python", script, *sys.argv[1:]])
