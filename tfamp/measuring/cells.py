"""The configuration of a benchmark, and the cells it comes to.

config = cells.get_config()
config.tasks.digits = cells.get_task(workloads.load("configs/cnn/digits.py"))
config.tasks.own = cells.get_task("my_script:build")
"""

import itertools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from ml_collections import config_dict

from tfamp import checks, errors, functions
from tfamp.facts import hardware, modes
from tfamp.measuring import workloads
from tfamp.measuring.torch_peer import exchange
from tfamp.precision import settings
from tfamp.runs import base_config, compare

JOBS = ("train", "inference")
FRAMEWORKS = ("tfamp", "keras", "torch")
JIT = {"auto": None, "on": True, "off": False}  # As `config.jit_compile` has it.
# Columns -> (mode, dtype that graphs are rewritten to or None).
VARIANTS = {
    "float32": ("float32", None),
    "tf32": ("tf32", None),
    "mixed_bfloat16": ("mixed_bfloat16", None),
    "mixed_float16": ("mixed_float16", None),
    "rewrite_bfloat16": ("mixed_bfloat16", "bfloat16"),
    "rewrite_float16": ("mixed_float16", "float16"),
}
# What a mode is compared with: the first that has figures. TF32 is what users have
# where the device has it; "float32" switches it off.
BASES = ("tf32", "float32")
_TINY_MODES = ("float32", "mixed_bfloat16")
# The cells' figures do not depend on these: a folder resumes with others.
_FREE = ("repeats", "memory_limit_mb", "time_limit", "torch_python", "tiny")
_FREE_OF_TASK = (
    *("modes", "slow_modes", "frameworks", "xla", "beside"),
    *("batch_sizes", "sequence_lengths", "jit"),
)
_FREE_OF_ACCURACY = ("modes", "seeds", "target")


# ---- Configurations ----


def get_config() -> config_dict.ConfigDict:
    """Returns the defaults of every benchmark; it has no task yet."""
    return config_dict.ConfigDict(
        {
            "name": "",  # Names the folder.
            "job": "train",  # The step of `fit`; "inference": of `predict`.
            "seed": 0,  # Of the first repeat; each has one of its own.
            # Processes of each cell, interleaved; the least for noise.
            "repeats": 3,
            "steps": 20,  # Timed steps of each; with accumulation, whole windows.
            "warmup": 10,  # Steps before them, the first one included.
            # Interpreter with PyTorch and transformers; "": this one.
            "torch_python": "",
            # What a cell's process may hold, of host or GPU memory. None: no limit.
            "memory_limit_mb": config_dict.placeholder(int),
            "time_limit": 3600,  # Seconds of a process.
            "tasks": {},  # Name -> `get_task`.
            "time_to_accuracy": {},  # Name -> `get_accuracy`.
            "tiny": {"repeats": 1, "steps": 2, "warmup": 1},
        }
    )


def get_task(workload: Any, **arguments: Any) -> config_dict.ConfigDict:
    """Returns the defaults of a task whose steps are timed.

    Args:
      workload: The configuration of a training run, or a function as
        `functions.name_of` takes it.
      **arguments: Keywords of the function.
    """
    own = isinstance(workload, config_dict.ConfigDict)
    return config_dict.ConfigDict(
        {
            # Its model, optimizer and loss on random batches; None: a function's.
            "config": workload if own else None,
            "function": "" if own else functions.name_of(workload),
            "arguments": arguments,
            # Columns; empty: those with units here, and one of 16 bits in any case.
            "modes": (),
            # Every mode that this machine can compute, and rewrites.
            "slow_modes": False,
            "frameworks": FRAMEWORKS if own else ("tfamp", "keras"),
            "batch_sizes": (),  # Empty: as the workload has it.
            "sequence_lengths": (),  # The same.
            # XLA; "auto": as the workload has it.
            "jit": ("off",) if own else ("auto",),
            "xla": (),  # Modes that are measured with XLA, too.
            "beside": "",  # The task that the base is of; "": this one.
        }
    )


def get_accuracy(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """Returns the defaults of a task that is trained up to a score.

    Args:
      config: The configuration of a training run; it needs a validation split.
    """
    return config_dict.ConfigDict(
        {
            "config": config,
            "modes": (),  # Empty: `plain_modes`, and the mode for this machine.
            "seeds": 3,
            "target": 0.95,  # Validation score.
        }
    )


def identity(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """Returns the configuration of a benchmark's folder: what its cells share.

    Args:
      config: The configuration.
    """
    one = config.copy_and_resolve_references()
    with one.unlocked():
        for name in _FREE:
            del one[name]
        parts = (one.tasks, _FREE_OF_TASK), (one.time_to_accuracy, _FREE_OF_ACCURACY)
        for tasks, free in parts:
            for task, name in itertools.product(tasks.values(), free):
                del task[name]
        one.benchmark = {"job": "suite"}
    return one


def apply_tiny(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """Returns a copy that takes seconds, to see that all works: tfamp's modes alone."""
    config = config.copy_and_resolve_references()
    config.update(config.tiny)
    config.name = f"{config.name}-tiny"
    tiny = {"frameworks": ("tfamp",), "batch_sizes": (), "xla": (), "seeds": 1}
    for task in (*config.tasks.values(), *config.time_to_accuracy.values()):
        if task.config is not None:
            task.config = base_config.apply_tiny(task.config)
        task.modes = task.modes or _TINY_MODES
        task.update({name: value for name, value in tiny.items() if name in task})
    return config


# ---- Cells ----


class Cell(NamedTuple):
    """What one process measures.

    Attributes:
      task: Name of a task of the benchmark's configuration.
      framework: "tfamp"; "keras": the same model in plain Keras, its policy set by hand
        and its own loss scaling; "torch": a twin of the model in PyTorch, with its AMP.
      mode: A key of `VARIANTS`.
      batch_size: Examples in a batch; None: as the function has it.
      sequence_length: Tokens of an example; None: as the workload has it.
      jit: A key of `JIT`.
    """

    task: str
    framework: str
    mode: str
    batch_size: int | None = None
    sequence_length: int | None = None
    jit: str = "auto"

    @property
    def column(self) -> str:
        """Framework, mode and XLA, as tables and figures name them."""
        name = self.mode if self.framework == "tfamp" else " ".join(self[1:3])
        return f"{name}, XLA" if self.jit == "on" else name

    @property
    def shape(self) -> str:
        """The sizes as text; "" without."""
        sizes = {"batch": self.batch_size, "length": self.sequence_length}
        return ", ".join(f"{name} {size}" for name, size in sizes.items() if size)

    @property
    def label(self) -> str:
        """The cell in a line."""
        return ", ".join(filter(None, [f"{self.task}: {self.column}", self.shape]))

    @property
    def key(self) -> str:
        """The cell as a part of a file's name."""
        sizes = f"batch{self.batch_size}-length{self.sequence_length}"
        # Since float32 has compiled updates, too.
        fused = "-fused" * (self.framework == "tfamp")
        return f"{self.task}-{self.framework}-{self.mode}-{sizes}-xla_{self.jit}{fused}"


def plan(config: config_dict.ConfigDict) -> list[Cell]:
    """Returns the cells, those to be compared next to each other.

    Plain Keras has no graph rewrite, and PyTorch neither that nor XLA; a task without a
    twin in PyTorch has none of its cells (`exchange.has_twin`).

    Args:
      config: The configuration of the benchmark.

    Raises:
      ValueError: If a setting is invalid.
    """
    validate(config)
    cells = [
        cell
        for name, task in config.tasks.items()
        for length in task.sequence_lengths or (None,)
        for size in task.batch_sizes or (None,)
        for cell in _cells(config, name, task, size, length)
    ]
    return list(dict.fromkeys(cells))


def _cells(config, name, task, batch_size, length) -> Iterator[Cell]:
    """The cells of one shape: float32 first."""
    columns = task.modes or default_modes(task.slow_modes)
    for framework in task.frameworks:
        ours = framework == "tfamp"
        supported = [mode for mode in columns if ours or VARIANTS[mode][1] is None]
        trained = config.job == "train"
        if framework == "torch" and not (trained and exchange.has_twin(task.config)):
            continue
        xla_choices = task.jit if framework != "torch" else ("off",)
        pairs = [(mode, jit) for jit in xla_choices for mode in supported]
        pairs += [(mode, "on") for mode in task.xla if ours]
        for mode, jit in pairs:
            own = batch_size or _own_batch_size(task.config, mode)
            yield Cell(name, framework, mode, own, length, jit)


def _own_batch_size(config, mode):
    """The batch size of a mode in a comparison; a function has its own."""
    return None if config is None else with_mode(config, mode, 0).batch_size


def plain_modes() -> tuple[str, ...]:
    """Returns "float32", and "tf32" where this host's devices have it."""
    fast = hardware.format_support("tf32", hardware.read_devices()).fast
    return ("float32", "tf32") if fast else ("float32",)


def default_modes(slow: bool = False) -> list[str]:
    """Returns the columns that the devices of this host can compute, float32 first.

    Args:
      slow: Whether those are among them whose format is slow here, and the rewrites.
        Else one slow mixed mode is, where no mixed mode is fast.
    """
    support = {
        name: hardware.format_support(
            modes.get_mode(mode).compute_format, hardware.read_devices()
        )
        for name, (mode, _) in VARIANTS.items()
    }
    if slow:
        return [name for name, each in support.items() if _computed(name, each)]
    plain = [name for name, (_, rewrite) in VARIANTS.items() if rewrite is None]
    columns = [name for name in plain if name == "float32" or support[name].fast]
    mixed = any(name.startswith("mixed") for name in columns)
    return columns if mixed else [*columns, "mixed_bfloat16"]


def _computed(variant, support):
    rewrite = VARIANTS[variant][1]
    try:
        if rewrite:
            settings.resolve_rewrite(rewrite)
    except (errors.UnsupportedModeError, ValueError):
        return False
    return variant == "float32" or support.supported


def with_mode(config, variant: str, seed: int) -> config_dict.ConfigDict:
    """Returns a training configuration in a column's mode.

    Args:
      config: The configuration of a run.
      variant: A key of `VARIANTS`.
      seed: The run's seed.
    """
    mode, rewrite = VARIANTS[variant]
    one = config.copy_and_resolve_references()
    one.precision.graph_rewrite = rewrite is not None
    if rewrite:
        one.precision.overrides = ()  # A rewrite knows no layers.
    return compare.config_of(one, mode, seed)


def config_of(task: Any, cell: Cell, seed: int) -> config_dict.ConfigDict:
    """Returns the training configuration of a cell.

    Args:
      task: The cell's task, from `get_task`; it has a configuration.
      cell: The cell.
      seed: The seed of its repeat.
    """
    one = with_mode(task.config, cell.mode, seed)
    one.batch_size, one.jit_compile = cell.batch_size, JIT[cell.jit]
    if cell.sequence_length:
        one.data.sequence_length = cell.sequence_length
    return one


def base(rows: Any, cell: Cell, config: Any) -> Cell | None:
    """Returns the cell that one is compared with: the first of `BASES` that there is.

    It is tfamp's without XLA, unless the task asks for several choices of XLA; of the
    same shape or, if that mode was measured with another batch size alone, of that one.

    Args:
      rows: The cells that have figures.
      cell: One of them.
      config: The configuration of the benchmark.
    """
    return next(filter(None, (_twin(rows, cell, mode, config) for mode in BASES)), None)


def _twin(rows, cell, mode, config):
    task = config.tasks[cell.task]
    jit = cell.jit if cell.jit in task.jit else task.jit[0]
    where = task.beside or cell.task
    base = Cell(where, "tfamp", mode, None, cell.sequence_length, jit)
    same = base._replace(batch_size=cell.batch_size)
    others = [x for x in rows if x._replace(batch_size=None) == base]
    if same in others:
        return same
    return others[0] if len(others) == 1 else None


# ---- Checks ----

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
_MODES = _some_of(VARIANTS)
# As in `base_config`: field -> what it must satisfy, as text and as a predicate.
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
    wrong = base_config.broken_rules(config, _RULES)
    for part, rules in ("tasks", _TASK_RULES), ("time_to_accuracy", _ACCURACY_RULES):
        for name, task in config[part].items():
            prefix = f"config.{part}.{name}"
            wrong += base_config.broken_rules(task, rules, prefix)
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
