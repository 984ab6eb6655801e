"""What all commands share: `--config`, a guarded run, one-line errors, a folder."""

import contextlib
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Callable, Sequence

import tensorflow as tf
from absl import app, flags, logging
from ml_collections import config_flags

from tfamp import errors
from tfamp.facts import switches
from tfamp.runs import run_files

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


def show_in_help(*modules: str) -> None:
    """Has the script's --help list the flags of modules; else --helpfull alone does.

    Args:
      *modules: Names of modules that define flags.
    """
    for module in modules:
        for flag in flags.FLAGS.get_flags_for_module(module):
            flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)


def run(main: Callable[[Sequence[str]], None]) -> None:
    """Parses the flags, runs the command, and exits with 1 and one line on an error.

    Args:
      main: Function of the command line.
    """
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
        say(f"error: {line} (--verbosity=1 shows the traceback)")
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
        say("interrupted; the same command resumes from here")
        sys.exit(130)


def _is_of_interest(record):
    """Drops what TensorFlow says of several models in one process, each traced once."""
    return "triggered tf.function retracing" not in record.getMessage()


def say(line: str) -> None:
    """Prints progress on standard error."""
    sys.stderr.write(f"{line}\n")


def default_workdir(config, job: str = "compare") -> pathlib.Path:
    """Returns runs/NAME-HASH: the same settings, the same folder, so runs resume.

    Args:
      config: The configuration of the job's folder.
      job: One of `jobs.JOBS`. "train" has its own folder: runs/NAME-train-HASH.
    """
    settings = run_files.with_old_names(run_files.plain_config(config))
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    name = f"{config.name}-train" if job == "train" else config.name
    return pathlib.Path("runs", f"{name}-{digest.hexdigest()[:8]}")
