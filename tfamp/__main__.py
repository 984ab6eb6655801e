"""Mixed precision for TensorFlow and Keras 3.

    tfamp status
    tfamp train cnn/digits --config.epochs=3
    tfamp train --config=my_config.py --job=train
    tfamp benchmark --workload=my_script:build
    tfamp doctor --simulate=a100
    tfamp gpu-report
    tfamp --version

`status` calls `tfamp.enable()` and prints its status. The others are
scripts/train.py, benchmark.py, doctor.py and gpu_plan.py, with their flags (`tfamp
train --help`). A name such as cnn/digits is a configuration that comes with tfamp.
"""

import importlib
import pathlib
import sys

import tfamp
from tfamp import checks

_CONFIGS = pathlib.Path(__file__).parent / "configs"
_COMMANDS = "status", "train", "benchmark", "doctor", "gpu-report"


def main() -> None:
    """Runs the command that is named first; its help and errors need no TensorFlow."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name == "status" and not sys.argv[2:]:
        print(tfamp.enable().full())
    elif name == "status":
        sys.exit(f"error: `tfamp status` takes no arguments. Received: {sys.argv[2:]}.")
    elif name in _COMMANDS:
        # As a script's, so that --help and errors speak of this command.
        sys.argv[:2] = [f"tfamp {name}"]
        sys.modules["__main__"].__doc__ = __doc__  # What --help begins with.
        if sys.argv[1:] and not sys.argv[1].startswith("-"):
            sys.argv[1] = f"--config={_find_config(name, sys.argv[1])}"
        _run_script(name.replace("-", "_"))
    elif name in ("-h", "--help", "help"):
        print(__doc__)
    elif name == "--version":
        print(f"tfamp {tfamp.__version__}")
    elif not name:
        sys.exit(__doc__)
    else:
        sys.exit(
            f"error: Unknown command. Received: {name!r}. Expected one of "
            f"{', '.join(_COMMANDS)}; see `tfamp --help`."
            f"{checks.nearest(name, _COMMANDS)}"
        )


def _find_config(command, name):
    """Returns the file of a configuration that comes with tfamp."""
    timed = _CONFIGS / "benchmark"
    files = {*_CONFIGS.glob("*/*.py")} - {*timed.glob("*.py")}
    if command == "benchmark":
        files = {*timed.glob("*.py")} - {timed / "models.py"}  # What they time.
    root = timed if command == "benchmark" else _CONFIGS
    configs = {str(path.relative_to(root).with_suffix("")): path for path in files}
    name, _, argument = name.partition(":")
    if name not in configs:
        sys.exit(
            f"error: Unknown configuration. Received: {name!r}. Expected "
            f"--config=FILE, or one of {', '.join(sorted(configs))}."
            f"{checks.nearest(name, configs)}"
        )
    return f"{configs[name]}:{argument}" if argument else configs[name]


def _run_script(name):
    from tfamp.commands import app, command_flags  # Not of --help.

    defaults = {"train": [None], "benchmark": [str(_CONFIGS / "benchmark/quick.py")]}
    getattr(command_flags, name)(*defaults.get(name, []))
    app.run(lambda: importlib.import_module(f"tfamp.commands.{name}").run_flags())


if __name__ == "__main__":
    main()
