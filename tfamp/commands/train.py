"""The command line of the training scripts: the job that the flags name."""

import os
import pathlib

import tensorflow as tf
from absl import flags
from ml_collections import config_flags

from tfamp import progress
from tfamp.commands import command_flags, jobs
from tfamp.measuring import batch_size, process_memory
from tfamp.runs import base_config, distribution, run_files, tasks

_TINY = 16  # Largest batch of a run of seconds.


def run_flags() -> None:
    """Runs the job that the flags describe and prints what it returns."""
    values = flags.FLAGS
    job, options = _find_job(values)
    if job in jobs.ON_RUNS.values():  # The run's own settings count.
        folder = pathlib.Path(
            values.workdir or run_files.default_workdir(_resolve(values), "train")
        )
        print(job.run(_settings_of(values, folder), folder, options))
        return
    config = _resolve(values)
    strategy = distribution.create(config)  # Before anything uses TensorFlow.
    named = job.identity(config, options)
    default = run_files.default_workdir(named, values.job)
    workdir = pathlib.Path(values.workdir or default)
    if values.overwrite:
        # A model under a strategy is built by all workers, or waits for the others.
        if any(distribution.exchange(strategy, int(workdir.exists()))):
            job.check(config, options)
            distribution.wait(strategy)
            if distribution.is_chief(strategy):
                run_files.delete_run(workdir)
        distribution.wait(strategy)
    progress.say(f"working directory: {workdir}")
    text = job.run(config, workdir, options)
    if distribution.is_chief(strategy):
        print(text)


def _resolve(values):
    """Returns the configuration with all that the flags say."""
    config = values.config
    base_config.check_fields(config)
    config.task = tasks.name_of(config)  # A file by its whole path.
    given, config = config, base_config.apply_fine_tuning(config)
    config = base_config.apply_tiny(config) if values.tiny else config
    if config is not given:
        config.update_from_flattened_dict(_flag_values())  # Flags win.
    with config.unlocked():
        # Part of the run's identity, wherever it resumes.
        for name in ("data_dir", "manual_dir"):
            is_set = values[name].present
            config[name] = _absolute(values[name].value if is_set else config[name])
    if config.manual_dir and not tf.io.gfile.isdir(config.manual_dir):
        raise ValueError(f"No such folder: --manual_dir={config.manual_dir}.")
    if values.numerics is not None:
        config.precision.numerics = values.numerics
    base_config.validate(config)
    return config


def _flag_values():
    """Returns what the command line sets in the configuration; {} without one."""
    flag = flags.FLAGS["config"]
    return {} if flag.value is None else config_flags.get_override_values(flag)


def _absolute(path):
    """Returns a folder that means the same elsewhere, as gs://bucket does."""
    return path if "://" in path else path and os.path.abspath(path)


def _settings_of(values, folder):
    """Returns the settings of the run in a folder.

    Raises:
      RunError: If the command line sets what would have been another training.
    """
    config = run_files.read_config(folder)
    with config.unlocked(), config.ignore_type():
        config.update_from_flattened_dict(_flag_values())
        run_files.open_folder(config, folder)
        for name in ("data_dir", "manual_dir"):  # Data may have been moved.
            config[name] = _absolute(values[name].value) or config[name]
    return config


def _find_job(values):
    """Returns the job that the flags name, and what else they ask of it."""
    name = values.job
    if values.find_batch_size:
        return jobs.SEARCH, _search_settings(values.tiny)
    if name in command_flags.TIMED:
        return jobs.TIMED, command_flags.benchmark_settings(name, values.tiny)
    return (
        (jobs.ON_RUNS[name], values)
        if name in jobs.ON_RUNS
        else (jobs.JOBS[name], values.seeds)
    )


def _search_settings(tiny):
    """Keywords of the search; a largest batch that was given counts."""
    limit, largest, whole = (flags.FLAGS[name] for name in command_flags.OF_SEARCH)
    return {
        "limit": limit.value and limit.value * process_memory.MIB,
        "effective_batch": whole.value,
        "max_batch_size": (_TINY if tiny else batch_size.MAX_BATCH_SIZE)
        if largest.value is None
        else largest.value,
    }
