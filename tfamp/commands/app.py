"""What all commands share: `--config`, a guarded run, one-line errors.

TensorFlow is imported once the flags are known to be right: help and errors are quick.
"""

import ast
import contextlib
import os
import pathlib
import re
import shlex
import signal
import sys
from collections.abc import Callable

from absl import app, flags, logging
from ml_collections import config_dict, config_flags

from tfamp import errors, functions, progress
from tfamp.commands import fields
from tfamp.runs import default_config

# What a user can mend: reported in one line. Anything else is a bug: traceback.
_USER_ERRORS = (errors.TfampError, ValueError, TypeError, ImportError, OSError)
# The same of the command line and of what is set in a configuration.
_MISTYPED = (flags.Error, KeyError, AttributeError, SyntaxError)
# The flags are not parsed yet where these are looked for.
_VERBOSE = {"--verbosity=1", "--verbosity=2", "-v=1", "-v=2"}
_BOLD = re.compile(r"\x1b\[\d*m")  # As Keras writes for a terminal.
_OF_CONFIG = re.compile(r"--?(no)?config([.=]|$)")
_HELP = re.compile(r"--?(help\w*|\?)$")  # Prints all flags, those to come, too.
# What configurations are made with needs no TensorFlow; other modules may.
_LIGHT = re.compile(
    r"ml_collections\b|tfamp$|tfamp\.training\b|tfamp\.recipes(\.(images|language_model|"
    r"presets|question_answering|segmentation|tabular|text_classification)(\.|$)|$)"
)
_CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
_PARTS = "config.precision.overrides."  # Of pairs, which no flag names one by one.


def define_config(
    default: str | None, check: Callable[[bool], None] | None = None
) -> None:
    """Defines `--config`, after all other flags: what is wrong with those is told now.

    Args:
      default: Path of the default configuration; None: there is none.
      check: Function that raises if the other flags do not go together, called with
        whether there is a configuration.
    """
    with _one_line_errors(*_MISTYPED):  # Overrides are applied while it is defined.
        arguments = flags.FLAGS.read_flags_from_files(sys.argv, force_gnu=False)
        of_config = [x for x in arguments if _OF_CONFIG.match(x)]
        others = [x for x in arguments if x not in of_config and not _HELP.match(x)]
        try:
            flags.FLAGS(others)  # Of `--config FILE` the file is left, and ends it.
        except flags.UnrecognizedFlagError as error:
            if "Did you mean" in str(error):
                raise
            field = [*fields.like(error.flagname), "FIELD"][0]
            raise ValueError(
                f"{error}. Expected a flag of --help; a field of the configuration is "
                f"set by --config.{field}=VALUE."
            ) from error
        light = [_is_light(default)] if default else []
        light += [_check_of_config(argument) for argument in of_config]
        if check and not any(map(_HELP.match, arguments)):
            check(bool(light))
        if not all(light):
            _import_tensorflow()
        config_flags.DEFINE_config_file(
            "config", default, "Configuration file.", lock_config=True
        )


def _check_of_config(argument):
    """Returns whether what an argument names is read without TensorFlow."""
    name, _, value = argument.lstrip("-").partition("=")
    if name.startswith(_PARTS):
        pair = name.removeprefix(_PARTS), value or "float32"
        raise ValueError(
            "Overrides are one tuple of pairs (pattern, mode). Received: "
            f'{argument!r}. Expected --{_PARTS[:-1]}="({pair!r},)".'
        )
    if name != "config":
        return True
    file = value.split(":")[0]  # An argument of the file's function may follow.
    if file and not os.path.isfile(file):
        comes_with = (_CONFIGS / f"{file}.py").is_file()
        raise ValueError(
            f"The file of --config does not exist. Received: {file!r}."
            + f" Expected no flag for it: `tfamp train {file}`." * comes_with
        )
    if file:
        functions.name_of(f"{file}:get_config")
    return bool(file) and _is_light(file)


def _is_light(file):
    """Whether a configuration imports nothing that may need TensorFlow."""
    names = []
    for node in ast.walk(ast.parse(pathlib.Path(file).read_bytes())):
        if isinstance(node, ast.Import):
            names += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{each.name}" for each in node.names]
    standard = sys.stdlib_module_names
    others = [name for name in names if name.split(".")[0] not in standard]
    return all(map(_LIGHT.match, others))


def _import_tensorflow():
    """Imports what `import tfamp` does elsewhere: releases are checked first."""
    signal.signal(signal.SIGTERM, _stop)  # From here on there is something to wait for.
    import tfamp.public  # noqa: F401


def run(main: Callable[[], None]) -> None:
    """Parses the flags, runs the command, and exits with 1 and one line on an error.

    Args:
      main: Function of the command line.
    """
    for module in (__name__, "tfamp.commands.command_flags"):
        for flag in flags.FLAGS.get_flags_for_module(module):
            # In --help; else --helpfull alone had it.
            flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    app.run(lambda argv: _guarded(main, argv), flags_parser=_parse)


def _parse(argv):
    """absl's parser, with errors in one line and without the list of all flags."""
    with _one_line_errors(*_MISTYPED):
        try:
            arguments = flags.FLAGS(argv)
            config = flags.FLAGS["config"].value if "config" in flags.FLAGS else None
            if isinstance(config, config_dict.ConfigDict):
                default_config.check_values(config)  # Without TensorFlow.
            return arguments
        except flags.UnrecognizedFlagError as error:
            name = error.flagname
            if not name.startswith("config.") or flags.FLAGS["config"].value:
                raise
            raise ValueError(f"--{name} also needs --config=FILE.") from error


@contextlib.contextmanager
def _one_line_errors(*more):
    """Exits with one line where something is wrong that a user can mend.

    So is anything that a user's own code raises, such as a task's functions.
    """
    try:
        yield
    except KeyboardInterrupt:
        _stop(signal.SIGINT)
    except Exception as error:
        verbose = logging.get_verbosity() >= logging.DEBUG
        line = "" if verbose or _VERBOSE.intersection(sys.argv) else _told(error, more)
        if not line:
            raise
        progress.say(f"error: {line} (--verbosity=1 shows the traceback)")
        sys.exit(1)


def _told(error, more):
    """Returns an error in one line; "" if it is none of a user's."""
    kinds = (*_USER_ERRORS, *more)
    if tensorflow := sys.modules.get("tensorflow"):
        kinds += (tensorflow.errors.OpError,)  # A corrupt file of a data set, say.
    theirs, place = error, functions.place_of(error)
    while isinstance(error, flags.Error) and theirs.__context__ and not place:
        theirs = theirs.__context__  # What a configuration's file raised is wrapped.
        place = functions.place_of(theirs)
    if place:
        text = f"{type(theirs).__name__}: {theirs}{place}"
    elif f"{error}".startswith("in user code:"):  # TensorFlow's, with the place.
        text = f"{error}"
    elif isinstance(error, kinds):
        text = _without_wrapping(error) or type(error).__name__
    else:
        return ""
    notes = getattr(theirs, "__notes__", [])
    return _BOLD.sub("", " ".join(". ".join([text, *notes]).split()))


def _without_wrapping(error):
    while error.args and isinstance(error.args[0], Exception):
        error = error.args[0]  # ConfigDict wraps its KeyError in an AttributeError.
    text = str(error.args[0]) if isinstance(error, KeyError) else str(error)
    name, _, hint = text.partition("\n")
    # ConfigDict's own, or of a dict in its place.
    if isinstance(error, KeyError) and (name.startswith("'") or name.isidentifier()):
        hint = hint or fields.hint_of(name.strip("'"))
        text = f"Unknown field of the configuration. Received: {name}. {hint}"
    return text


def _guarded(main, argv):
    """Runs a command whose flags are right."""
    with _one_line_errors():
        if len(argv) > 1:
            raise ValueError(f"Unexpected arguments: {' '.join(argv[1:])}.")
        _prepare_tensorflow()
        main()


def _prepare_tensorflow():
    _import_tensorflow()
    import tensorflow as tf

    from tfamp.facts import switches

    # Others may be on this GPU. Read when TensorFlow starts; the switches report it.
    os.environ.setdefault(switches.GROWTH, "true")
    if not flags.FLAGS["verbosity"].present:
        # TensorFlow logs its own messages through absl at INFO.
        logging.set_verbosity(logging.WARNING)
        tf.get_logger().addFilter(_is_of_interest)


def _stop(number, _=None):
    """Ends the command; a signal in a training step is `BackupAndRestore`'s."""
    progress.say(
        f"{signal.Signals(number).name}: stopped; the same command goes on from what "
        "is saved, or starts again if nothing is"
    )
    sys.exit(128 + number)


def _is_of_interest(record):
    """Drops what TensorFlow says of several models in one process, each traced once."""
    return "triggered tf.function retracing" not in record.getMessage()


def typed() -> str:
    """Returns the command line, for a report."""
    script = sys.argv[0]  # Or `tfamp benchmark`.
    if os.path.isfile(script):
        script = f"python {os.path.relpath(script)}"
    return f"{script} {shlex.join(sys.argv[1:])}".rstrip()
