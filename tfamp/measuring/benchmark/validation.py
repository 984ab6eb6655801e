"""Which settings of a benchmark make sense."""

import re

from ml_collections import config_dict

from tfamp import checks
from tfamp.measuring import workloads
from tfamp.measuring.benchmark import cell_modes
from tfamp.runs import default_config

JOBS = ("train", "inference")
FRAMEWORKS = ("tfamp", "keras", "torch")
JIT = {"auto": None, "on": True, "off": False}  # As `config.jit_compile` has it.
_NAME = re.compile(r"[\w-]+")
_NAME_WORDS = "a name of letters, digits, '_' and '-'"


def _some_of(choices):
    return (
        f"some of {', '.join(map(repr, choices))}",
        lambda values: set(values) <= set(choices),
    )


_AT_LEAST_1 = ("at least 1", lambda v: v >= 1)
_COUNTS = (
    "integers of at least 1",
    lambda values: all(checks.is_integer(v) and v >= 1 for v in values),
)
_MODES = _some_of(cell_modes.VARIANTS)
# As in `default_config`: field -> what it must satisfy, as text and as a predicate.
_RULES = {
    **dict.fromkeys(("repeats", "steps", "warmup"), _AT_LEAST_1),
    **dict.fromkeys(("memory_limit_mb", "time_limit"), _AT_LEAST_1),
    "name": (_NAME_WORDS, lambda name: bool(_NAME.fullmatch(name))),
    "job": (f"one of {', '.join(JOBS)}", lambda job: job in JOBS),
}
_TASK_RULES = {
    **{"modes": _MODES, "xla": _MODES, "jit": _some_of(JIT)},
    "frameworks": _some_of(FRAMEWORKS),
    **{"batch_sizes": _COUNTS, "sequence_lengths": _COUNTS},
}
_ACCURACY_RULES = {
    "modes": _MODES,
    "seeds": _AT_LEAST_1,
    "target": ("above 0", lambda v: v > 0),
}


def validate(config: config_dict.ConfigDict) -> None:
    """Raises ValueError, naming all fields at once, if a value makes no sense.

    Args:
      config: The configuration.
    """
    wrong = default_config.broken_rules(config, _RULES)
    for part, rules in ("tasks", _TASK_RULES), ("time_to_accuracy", _ACCURACY_RULES):
        for name, task in config[part].items():
            prefix = f"config.{part}.{name}"
            wrong += default_config.broken_rules(task, rules, prefix)
            if not _NAME.fullmatch(name):
                wrong.append(f"{prefix} must be {_NAME_WORDS}. Received: {name!r}.")
            if task.config is not None:
                workloads.validate(task.config)
            if task.get("beside") and task.beside not in config.tasks:
                wrong.append(f"{prefix}.beside must name a task. Received: no task.")
            if part == "time_to_accuracy" and not task.config.validation_fraction:
                wrong.append(
                    "Time to accuracy needs a validation split. Received: "
                    f"{prefix}.config.validation_fraction=0."
                )
    if not config.tasks and not config.time_to_accuracy:
        wrong.append("config.tasks is empty: there is nothing to measure.")
    if wrong:
        raise ValueError(" ".join(wrong))
