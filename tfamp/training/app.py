"""What the training scripts share: flags, one library call, one-line errors."""

import contextlib
import functools
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

from tfamp import errors
from tfamp.precision import control
from tfamp.training import (
    base_config,
    batch_size,
    compare,
    distribution,
    figures,
    folder_lock,
    pipeline,
    precision_config,
    run_files,
    tasks,
    trainer,
)

JOBS = ("compare", "train")
# `tfamp.benchmark.jobs`, where the script has its jobs, too: training imports nothing
# of the benchmarks, which import it.
_benchmarks: types.ModuleType | None = None
# What a user can mend: reported in one line. Anything else is a bug: traceback.
_USER_ERRORS = (
    errors.TfampError,
    ValueError,
    TypeError,
    ImportError,
    OSError,
    tf.errors.OpError,  # A corrupt file of a prepared data set, say.
)


# The flags are not parsed yet where these are looked for.
_VERBOSE = {"--verbosity=1", "--verbosity=2", "-v=1", "-v=2"}


def define_flags(default_config: str, benchmarks: types.ModuleType) -> None:
    """Defines the flags of a training script.

    Args:
      default_config: Path of the default configuration; must work offline.
      benchmarks: `tfamp.benchmark.jobs`.
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
        (*JOBS, *benchmarks.JOBS),
        "compare: float32 and the mixed mode; train: one mode; train_benchmark and "
        "inference_benchmark: steps timed on synthetic data.",
    )
    flags.DEFINE_integer("seeds", 1, "How many seeds to compare over.", lower_bound=1)
    flags.DEFINE_bool("tiny", False, "A run of seconds, to see that all works.")
    flags.DEFINE_bool("overwrite", False, "Delete a run in --workdir first.")
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


def define_config(default: str) -> None:
    """Defines `--config`.

    Args:
      default: Path of the default configuration.
    """
    with _one_line_errors(sys.argv):  # Overrides are applied while it is defined.
        config_flags.DEFINE_config_file(
            "config", default, "Configuration file.", lock_config=True
        )


def run(main: Callable[[Sequence[str]], None] | None = None) -> None:
    """Parses the flags, runs the job, and exits with 1 and one line on an error.

    Args:
      main: Function of the command line; default: `run_job` with the flags.
    """
    main = main or (lambda argv: run_flags())
    app.run(lambda argv: _guarded(main, argv), flags_parser=_parse)


def _parse(argv):
    """absl's parser, with errors in one line and without the list of all flags."""
    with _one_line_errors(argv):
        return flags.FLAGS(argv)


@contextlib.contextmanager
def _one_line_errors(argv):
    """Exits with one line where the command line or the configuration is wrong."""
    try:
        yield
    except (flags.Error, KeyError, AttributeError, SyntaxError, *_USER_ERRORS) as e:
        if _VERBOSE.intersection(argv):
            raise
        _exit(e)


def _guarded(main, argv):
    if not flags.FLAGS["verbosity"].present:
        # TensorFlow tells of its own doings through absl at INFO.
        logging.set_verbosity(logging.WARNING)
        tf.get_logger().addFilter(_is_of_interest)
    try:
        if len(argv) > 1:
            raise ValueError(f"Unexpected arguments: {' '.join(argv[1:])}.")
        main(argv)
    except KeyboardInterrupt:
        say("interrupted; the same command goes on from here")
        sys.exit(130)
    except _USER_ERRORS as e:
        if logging.get_verbosity() >= logging.DEBUG:
            raise
        _exit(e)


def _is_of_interest(record):
    """Drops what TensorFlow says of several models in one process, each traced once."""
    return "triggered tf.function retracing" not in record.getMessage()


def _exit(error):
    while error.args and isinstance(error.args[0], Exception):
        error = error.args[0]  # ConfigDict wraps its KeyError in an AttributeError.
    text = str(error.args[0]) if isinstance(error, KeyError) else str(error)
    line = " ".join(text.split()) or type(error).__name__
    say(f"error: {line} (--verbosity=1 shows the traceback)")
    sys.exit(1)


def run_flags() -> None:
    """Runs the job that the flags describe and prints its table."""
    values = flags.FLAGS
    config = values.config
    if values.tiny:
        config = base_config.apply_tiny(config)
        given = config_flags.get_override_values(flags.FLAGS["config"])
        config.update_from_flattened_dict(given)  # What was asked for wins.
    with config.unlocked():
        # Absolute: part of what the run is, wherever it goes on from.
        config.data_dir = values.data_dir and os.path.abspath(values.data_dir)
        config.manual_dir = values.manual_dir and os.path.abspath(values.manual_dir)
    base_config.validate(config)
    _check_job(values.job, values.seeds)
    benchmarks: Any = _benchmarks
    benchmark = benchmarks.settings(values.job, values.tiny)
    given = [name for name in ("job", "seeds") if flags.FLAGS[name].present]
    search = batch_size.settings(given, values.tiny)
    strategy = distribution.create(config)  # Before anything uses TensorFlow.
    asked = search or benchmark
    owner: Any = batch_size if search else benchmarks
    named = owner.identity(config, asked) if asked else config
    workdir = pathlib.Path(values.workdir or default_workdir(named, values.job))
    if values.overwrite:
        # Nothing is deleted for a command whose settings or data are wrong.
        plan = functools.partial(owner.plan, settings=asked)
        ready = functools.partial(check, job=values.job, seeds=values.seeds)
        _delete_run(config, workdir, strategy, plan if asked else ready)
    say(f"working directory: {workdir}")
    if search:
        found = batch_size.run(config, workdir, search, report=say)
        text = f"{found.to_text()}\nfiles: {workdir}"
    elif benchmark:
        text = _benchmark(benchmarks.run(config, workdir, benchmark, say), workdir)
    else:
        text = run_job(values.job, config, workdir, values.seeds)
    if distribution.is_chief(strategy):
        print(text)


def _delete_run(config, workdir, strategy, check_first):
    if distribution.is_chief(strategy) and workdir.exists():
        check_first(config)
        delete_folder(workdir)
    distribution.wait(strategy)


def delete_folder(workdir: pathlib.Path) -> None:
    """Deletes a job's folder, if it is there and no other process works in it.

    Raises:
      RunError: As `run_files.delete_run`.
    """
    if workdir.exists():
        with folder_lock.locked(workdir):
            run_files.delete_run(workdir)


def say(line: str) -> None:
    """Tells a user of progress, on standard error."""
    sys.stderr.write(f"{line}\n")


def check(config, job: str = "train", seeds: int = 1) -> None:
    """Raises unless the settings make sense here, and data and model can be made.

    Args:
      config: The resolved configuration.
      job: "train" or "compare".
      seeds: Of a comparison.
    """
    base_config.validate(config)
    if job == "compare":
        compare.plan(config, seeds)
    strategy = distribution.create(config)
    keywords = precision_config.enable_keywords(config.precision)
    with control.enabled(config.precision.mode, **keywords):
        task = tasks.from_config(config)
        steps = pipeline.steps_per_epoch(task.train, config.batch_size)
        total = steps * config.epochs
        with distribution.scope(strategy):
            model, metrics = task.build_model(), task.metrics()
            trainer.compile_model(model, config, total, task.loss, metrics)


def run_job(
    job: str,
    config,
    workdir: str | os.PathLike,
    seeds: int = 1,
) -> str:
    """Runs a job and returns what a person wants to read of it.

    Args:
      job: One of `JOBS`.
      config: The resolved configuration.
      workdir: Folder of the runs.
      seeds: Seeds to compare over.

    Returns:
      A table and where the files are.

    Raises:
      ValueError: If the job is unknown, or several seeds are asked of another job
        than "compare".
    """
    _check_job(job, seeds)
    if job == "train":
        return _train(config, workdir)
    comparison = compare.compare(config, workdir, seeds, report=say)
    exported, *written = (
        pathlib.Path(workdir, name)
        for name in (comparison.export["path"], "report.md", "comparison.png")
    )
    return "\n".join(
        [
            comparison.to_text(),
            f"exported in float32, reloaded and verified: {exported}",
            f"report and figure: {', '.join(str(p) for p in written if p.exists())}",
        ]
    )


def _check_job(job, seeds):
    known = (*JOBS, *(_benchmarks.JOBS if _benchmarks else ()))
    if job not in known:
        raise ValueError(f"Unknown job. Received: {job!r}. Expected one of {known}.")
    if job != "compare" and seeds != 1:
        raise ValueError(
            f"--seeds belongs to --job=compare. Received: --seeds={seeds}."
        )


def _benchmark(result, workdir):
    """The report of a benchmark's job, unless all failed."""
    if result.failed:
        raise errors.RunError(
            f"Every cell of the benchmark failed, see {workdir}/report.md. Received of "
            f"the first: {result.failed}"
        )
    return f"{result.to_markdown()}\nfiles: {workdir}"


def _train(config, workdir):
    """Trains in one mode; returns the result, a field a line."""
    result = trainer.train_and_evaluate(config, workdir)
    if distribution.is_chief(distribution.create(config)):
        figures.write_timeline(workdir, config.name, result.mode, result.seed)
    scores = ", ".join(f"{name} {score}" for name, score in result.scores.items())
    fields = {**result._asdict(), "scores": scores}
    lines = [f"{key}: {value}" for key, value in fields.items()]
    return "\n".join([*lines, f"files: {workdir}"])


def default_workdir(config, job: str = "compare") -> pathlib.Path:
    """Returns runs/NAME-HASH: the same settings, the same folder, so runs resume.

    Args:
      config: The resolved configuration; of a benchmark, its `identity`.
      job: One of `JOBS`. "train" has a folder of its own: runs/NAME-train-HASH.
    """
    settings = run_files.plain_config(config)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    name = f"{config.name}-train" if job == "train" else config.name
    return pathlib.Path("runs", f"{name}-{digest.hexdigest()[:8]}")
