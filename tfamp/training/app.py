"""What the training scripts share: flags, one library call, one-line errors."""

import contextlib
import hashlib
import json
import os
import pathlib
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import app, flags, logging
from ml_collections import config_flags

from tfamp import errors, functions
from tfamp.facts import switches
from tfamp.training import (
    base_config,
    batch_size,
    distribution,
    jobs,
    run_files,
)

# What a user can mend: reported in one line. Anything else is a bug: traceback.
_USER_ERRORS = (
    errors.TfampError,
    ValueError,
    TypeError,
    ImportError,
    OSError,
    tf.errors.OpError,  # A corrupt file of a prepared data set, say.
)
# The same of the command line and of what is set in a configuration.
_MISTYPED = (flags.Error, KeyError, AttributeError, SyntaxError)
# The flags are not parsed yet where these are looked for.
_VERBOSE = {"--verbosity=1", "--verbosity=2", "-v=1", "-v=2"}
# `tfamp.benchmark.jobs`, from the scripts: training imports nothing of the benchmarks,
# which import it.
_benchmarks: Any = None


def _benchmark(config, workdir, asked):
    return f"{_benchmarks.run(config, workdir, asked, jobs.say)}\nfiles: {workdir}"


def define_flags(default_config: str | None, benchmarks: types.ModuleType) -> None:
    """Defines the flags of a training script.

    Args:
      default_config: Path of the default configuration; must work offline. None: the
        command line must name one.
      benchmarks: `tfamp.benchmark.jobs`, the jobs besides those here.
    """
    global _benchmarks
    _benchmarks = benchmarks
    define_config(default_config)
    flags.DEFINE_string(
        "workdir", None, "Folder of the run; default: runs/NAME-HASH of the settings."
    )
    flags.DEFINE_string("data_dir", "", "Folder of prepared (TFDS) or local data.")
    flags.DEFINE_string("manual_dir", "", "Folder of a TFDS data set's original files.")
    flags.DEFINE_enum(
        "job",
        "compare",
        [*jobs.JOBS, *jobs.ON_RUNS, *benchmarks.JOBS],
        "compare: train in float32 and the mixed mode; train: in one mode; evaluate, "
        "predict and export: use the model that a run in --workdir has trained; "
        "train_benchmark and inference_benchmark: time steps on synthetic data.",
    )
    flags.DEFINE_string(
        "input", "", "Rows for --job=predict: a .csv, .tsv or .jsonl file."
    )
    flags.DEFINE_string(
        "output", "", "Result of --job=predict and export; default: in --workdir."
    )
    flags.DEFINE_string(
        "precision", "float32", "Compute dtype of the SavedModel of --job=export."
    )
    flags.DEFINE_integer("seeds", 1, "Number of seeds to compare over.", lower_bound=1)
    flags.DEFINE_bool("tiny", False, "Run for a few seconds, as a check.")
    flags.DEFINE_bool("overwrite", False, "Delete the run in --workdir first.")
    flags.DEFINE_integer(
        "numerics",
        None,
        "Steps between measurements by tfamp.NumericsMonitor of underflow and "
        "overflow in 16 bits; written to the folder `numerics` of each run.",
        lower_bound=1,
    )
    benchmarks.define()
    batch_size.define()
    show_in_help(__name__, benchmarks.__name__, batch_size.__name__)


def show_in_help(*modules: str) -> None:
    """Has the script's --help list the flags of modules; else --helpfull alone does.

    Args:
      *modules: Names of modules that define flags.
    """
    for module in modules:
        for flag in flags.FLAGS.get_flags_for_module(module):
            flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)


def define_config(default: str | None) -> None:
    """Defines `--config`.

    Args:
      default: Path of the default configuration; None: there is none.
    """
    with _one_line_errors(*_MISTYPED):  # Overrides are applied while it is defined.
        for argument in sys.argv:
            name, _, file = argument.partition("=")
            file = file.split(":")[0]  # An argument of the file's function may follow.
            if name.lstrip("-") == "config" and file and not os.path.isfile(file):
                raise ValueError(
                    f"The file of --config does not exist. Received: {file!r}."
                )
        config_flags.DEFINE_config_file(
            "config", default, "Configuration file.", lock_config=True
        )


def run(main: Callable[[Sequence[str]], None] | None = None) -> None:
    """Parses the flags, runs the job, and exits with 1 and one line on an error.

    Args:
      main: Function of the command line; default: `run_flags`.
    """
    main = main or (lambda argv: run_flags())
    # Others may be on this GPU. Read when TensorFlow starts; the switches report it.
    os.environ.setdefault(switches.GROWTH, "true")
    app.run(lambda argv: _guarded(main, argv), flags_parser=_parse)


def _parse(argv):
    """absl's parser, with errors in one line and without the list of all flags."""
    with _one_line_errors(*_MISTYPED):
        try:
            return flags.FLAGS(argv)
        except flags.UnrecognizedFlagError as error:
            name = error.flagname
            if not name.startswith("config.") or flags.FLAGS["config"].value:
                raise
            raise ValueError(f"--{name} also needs --config=FILE.") from error


@contextlib.contextmanager
def _one_line_errors(*more):
    """Exits with one line where something is wrong that a user can mend."""
    try:
        yield
    except (*_USER_ERRORS, *more) as error:
        if logging.get_verbosity() >= logging.DEBUG or _VERBOSE.intersection(sys.argv):
            raise
        while error.args and isinstance(error.args[0], Exception):
            error = error.args[0]  # ConfigDict wraps its KeyError in an AttributeError.
        text = str(error.args[0]) if isinstance(error, KeyError) else str(error)
        if isinstance(error, KeyError) and text.startswith("'"):  # ConfigDict's own.
            name, _, hint = text.partition("\n")
            text = f"Unknown field of the configuration. Received: {name}. {hint}"
        line = " ".join(text.split()) or type(error).__name__
        jobs.say(f"error: {line} (--verbosity=1 shows the traceback)")
        sys.exit(1)


def _guarded(main, argv):
    if not flags.FLAGS["verbosity"].present:
        # TensorFlow logs its own messages through absl at INFO.
        logging.set_verbosity(logging.WARNING)
        tf.get_logger().addFilter(_is_of_interest)
    try:
        with _one_line_errors():
            if len(argv) > 1:
                raise ValueError(f"Unexpected arguments: {' '.join(argv[1:])}.")
            main(argv)
    except KeyboardInterrupt:
        jobs.say("interrupted; the same command resumes from here")
        sys.exit(130)


def _is_of_interest(record):
    """Drops what TensorFlow says of several models in one process, each traced once."""
    return "triggered tf.function retracing" not in record.getMessage()


def run_flags() -> None:
    """Runs the job that the flags describe and prints what it returns."""
    values = flags.FLAGS
    job, asked = _find_job(values)
    if job in jobs.ON_RUNS.values():  # The run's own settings count.
        folder = values.workdir or default_workdir(_resolve(values), "train")
        folder = pathlib.Path(folder)
        print(job.run(_settings_of(values, folder), folder, asked))
        return
    config = _resolve(values)
    strategy = distribution.create(config)  # Before anything uses TensorFlow.
    named = job.identity(config, asked)
    workdir = pathlib.Path(values.workdir or default_workdir(named, values.job))
    if values.overwrite:
        # A model under a strategy is built by all workers, or waits for the others.
        if any(distribution.exchange(strategy, int(workdir.exists()))):
            job.check(config, asked)
            distribution.wait(strategy)
            if distribution.is_chief(strategy):
                run_files.delete_run(workdir)
        distribution.wait(strategy)
    jobs.say(f"working directory: {workdir}")
    text = job.run(config, workdir, asked)
    if distribution.is_chief(strategy):
        print(text)


def _resolve(values):
    """Returns the configuration with all that the flags say."""
    config = values.config
    if config is None:
        expected = "--config=FILE, or a name as in `tfamp train cnn/digits`"
        if values.job in jobs.ON_RUNS:
            expected += ", or --workdir=FOLDER of a run"
        raise ValueError(
            f"No configuration. Received: no --config. Expected: {expected}."
        )
    if ":" in config.task:
        config.task = functions.name_of(config.task)  # A file by its whole path.
    if values.tiny:
        config = base_config.apply_tiny(config)
        config.update_from_flattened_dict(_given())  # Flags win.
    with config.unlocked():
        # Part of the run's identity, wherever it resumes.
        config.data_dir = _absolute(values.data_dir)
        config.manual_dir = _absolute(values.manual_dir)
    if config.manual_dir and not tf.io.gfile.isdir(config.manual_dir):
        raise ValueError(f"No such folder: --manual_dir={config.manual_dir}.")
    if values.numerics is not None:
        config.precision.numerics = values.numerics
    base_config.validate(config)
    return config


def _given():
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
        config.update_from_flattened_dict(_given())
        run_files.open_folder(config, folder)
        for name in ("data_dir", "manual_dir"):  # Data may have been moved.
            config[name] = _absolute(values[name].value) or config[name]
    return config


def _find_job(values):
    """Returns the job that the flags name, and what else they ask of it."""
    search, name = values.find_batch_size, "" if values.find_batch_size else values.job
    timed = _benchmarks.JOBS
    for wanted, owner, others in (
        (search, "--find_batch_size", batch_size.FLAGS),
        (name, "a command without --find_batch_size", ("job",)),
        (name in timed, f"--job={' and --job='.join(timed)}", _benchmarks.FLAGS),
        (name == "compare", "--job=compare", ("seeds",)),
        (name == "predict", "--job=predict", ("input",)),
        (name in ("predict", "export"), "--job=predict and --job=export", ("output",)),
        (name == "export", "--job=export", ("precision",)),
        (name not in jobs.ON_RUNS, "a job that trains or measures", ("overwrite",)),
    ):
        given = [f"--{other}" for other in others if flags.FLAGS[other].present]
        if given and not wanted:
            given = ", ".join(given)
            raise ValueError(f"{given} belongs to {owner}. Received: {given}.")
    if search:
        return jobs.SEARCH, batch_size.settings(values.tiny)
    if name in timed:
        job = jobs.Job(_benchmark, _benchmarks.plan, _benchmarks.identity)
        return job, _benchmarks.settings(name, values.tiny)
    return (
        (jobs.ON_RUNS[name], values)
        if name in jobs.ON_RUNS
        else (jobs.JOBS[name], values.seeds)
    )


def default_workdir(config, job: str = "compare") -> pathlib.Path:
    """Returns runs/NAME-HASH: the same settings, the same folder, so runs resume.

    Args:
      config: The configuration of the job's folder.
      job: One of `jobs.JOBS`. "train" has its own folder: runs/NAME-train-HASH.
    """
    settings = run_files.plain_config(config)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    name = f"{config.name}-train" if job == "train" else config.name
    return pathlib.Path("runs", f"{name}-{digest.hexdigest()[:8]}")
