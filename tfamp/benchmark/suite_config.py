"""What benchmarks start from; files in `configs/benchmark` are deltas.

config = suite_config.get_config()
config.tasks.digits = suite_config.get_task(load("configs/cnn/digits.py"))
"""

import os
import pathlib
import re
import runpy

from ml_collections import config_dict

from tfamp import checks
from tfamp.benchmark import records
from tfamp.training import base_config

# Fields that the cells' figures do not depend on: a folder goes on under others.
_FREE = ("repeats", "memory_limit_mb", "torch_python", "tiny")
_FREE_OF_TASK = (
    *("modes", "slow_modes", "frameworks", "batch_sizes"),
    *("xla", "xla_frameworks"),
)
_TINY_MODES = ("float32", "mixed_bfloat16")
_FREE_OF_ACCURACY = ("modes", "seeds", "target")


def get_config() -> config_dict.ConfigDict:
    """Returns the defaults of every benchmark; it has no task yet."""
    config = config_dict.ConfigDict()
    config.name = ""  # Names the folder.
    config.seed = 0  # Of the first repeat; each has one of its own.
    config.repeats = 3  # Processes of each cell, interleaved.
    config.steps = 20  # Timed steps of each.
    config.warmup = 10  # Steps before them, the first one included.
    # Interpreter with PyTorch and transformers; "": this one.
    config.torch_python = ""
    # What a cell's process may hold, of host or GPU memory. None: no limit.
    config.memory_limit_mb = config_dict.placeholder(int)
    config.calibration_seconds = 1.5  # For each format; 0: no calibration.
    config.profile_steps = 3  # Profiled after the timed ones; 0: none.
    config.tasks = config_dict.ConfigDict()  # Name -> `get_task`.
    config.time_to_accuracy = config_dict.ConfigDict()  # Name -> `get_accuracy`.
    config.tiny = config_dict.ConfigDict(
        {
            "repeats": 1,
            "steps": 2,
            "warmup": 1,
            "calibration_seconds": 0.05,
            "profile_steps": 1,
        }
    )
    return config


def get_task(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """Returns the defaults of a task whose steps are timed.

    Args:
      config: The configuration of a training run.
    """
    task = config_dict.ConfigDict()
    task.config = config
    # Random batches, or those that a run trains on.
    task.synthetic = False
    # Columns; empty: those that this machine can compute (`suite.default_modes`).
    task.modes = ()
    task.slow_modes = True  # Among these, those whose format is slow here.
    task.frameworks = records.FRAMEWORKS
    task.batch_sizes = ()  # Empty: the configuration's.
    task.xla = ()  # Those of the modes that are measured with XLA, too, ...
    task.xla_frameworks = ("tfamp", "keras")  # ... in these; PyTorch has none.
    return task


def get_accuracy(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """Returns the defaults of a task that is trained up to a score.

    Args:
      config: The configuration of a training run; it needs a validation split.
    """
    accuracy = config_dict.ConfigDict()
    accuracy.config = config
    accuracy.modes = ()  # Empty: float32 and the mode for this machine.
    accuracy.seeds = 3
    accuracy.target = 0.95  # Validation score.
    return accuracy


def load(path: str | os.PathLike, beside: str | os.PathLike = ""):
    """Returns the configuration of a file.

    Args:
      path: A file with a function `get_config`.
      beside: A file whose folder `path` is relative to, such as `__file__`.
    """
    file = pathlib.Path(beside).parent / path
    return runpy.run_path(str(file))["get_config"]()


def identity(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """Returns the configuration of a benchmark's folder; it names what cells share.

    Cells are files of the folder: more of them, more repeats and seeds go on from those
    that there are.

    Args:
      config: The configuration.
    """
    one = config.copy_and_resolve_references()
    with one.unlocked():
        for name in _FREE:
            del one[name]
        for tasks, free in (
            (one.tasks, _FREE_OF_TASK),
            (one.time_to_accuracy, _FREE_OF_ACCURACY),
        ):
            for task in tasks.values():
                for name in free:
                    del task[name]
        one.benchmark = {"job": "suite"}
    return one


def apply_tiny(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """Returns a copy that takes seconds, to see that all works: tfamp's modes alone."""
    config = config.copy_and_resolve_references()
    config.update(config.tiny)
    config.name = f"{config.name}-tiny"
    for task in (*config.tasks.values(), *config.time_to_accuracy.values()):
        task.config = base_config.apply_tiny(task.config)
        if not task.modes:
            task.modes = _TINY_MODES
    for task in config.tasks.values():
        task.update({"frameworks": ("tfamp",), "batch_sizes": (), "xla": ()})
    for accuracy in config.time_to_accuracy.values():
        accuracy.seeds = 1
    return config


def validate(config: config_dict.ConfigDict) -> None:
    """Raises ValueError, naming all fields at once, if a value makes no sense.

    Args:
      config: The configuration.
    """
    wrong = base_config.broken_rules(config, _RULES)
    parts = {"tasks": _TASK_RULES, "time_to_accuracy": _ACCURACY_RULES}
    for part, rules in parts.items():
        wrapper = {"tasks": get_task, "time_to_accuracy": get_accuracy}[part]
        for name, task in config[part].items():
            if not set(wrapper(None)) <= set(task):
                raise ValueError(
                    f"config.{part}.{name} must be made by `suite_config."
                    f"{wrapper.__name__}(training_config)`. Received fields: "
                    f"{', '.join(sorted(task))}."
                )
            base_config.validate(task.config)
            prefix = f"config.{part}.{name}"
            wrong += base_config.broken_rules(task, rules, prefix)
            if not _NAME.fullmatch(name):
                wrong.append(f"{prefix} must be {_NAME_WORDS}. Received: {name!r}.")
    if not config.tasks and not config.time_to_accuracy:
        wrong.append("config.tasks is empty: there is nothing to measure.")
    if wrong:
        raise ValueError(" ".join(wrong))


def _are_of(known):
    return f"some of {', '.join(known)}", lambda values: set(values) <= set(known)


_MODES = _are_of(records.VARIANTS)
_NAME = re.compile(r"[\w-]+")
_NAME_WORDS = "a name of letters, digits, '_' and '-'"
# As in `base_config`: field -> what it must satisfy, in words and as a predicate.
_RULES = {
    **{
        name: ("at least 1", lambda v: v >= 1)
        for name in ("repeats", "steps", "warmup", "memory_limit_mb")
    },
    "name": (_NAME_WORDS, lambda name: bool(_NAME.fullmatch(name))),
    "seed": ("at least 0", lambda v: v >= 0),
    "profile_steps": ("at least 0", lambda v: v >= 0),
    "calibration_seconds": ("in [0, 600]", lambda v: 0 <= v <= 600),
}
_TASK_RULES = {
    "modes": _MODES,
    "xla": _MODES,
    "frameworks": (
        f"one or more of {', '.join(records.FRAMEWORKS)}",
        lambda values: bool(values) and set(values) <= set(records.FRAMEWORKS),
    ),
    "xla_frameworks": _are_of(records.FRAMEWORKS[:2]),
    "batch_sizes": (
        "integers of at least 1",
        lambda values: all(checks.is_integer(v) and v >= 1 for v in values),
    ),
}
_ACCURACY_RULES = {"modes": _MODES, "seeds": ("at least 1", lambda v: v >= 1)}
