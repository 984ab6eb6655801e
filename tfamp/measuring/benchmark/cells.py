"""The configuration of a benchmark, and the cells it comes to.

config = cells.get_config()
config.tasks.digits = cells.get_task(workloads.load("configs/cnn/digits.py"))
config.tasks.own = cells.get_task("my_script:build")
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from ml_collections import config_dict

from tfamp import functions
from tfamp.measuring.benchmark import cell_modes, validation
from tfamp.measuring.torch_peer import exchange
from tfamp.runs import base_config

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
            "frameworks": validation.FRAMEWORKS if own else ("tfamp", "keras"),
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
            "modes": (),  # Empty: float32, TF32, and the mode for this machine.
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
      mode: A key of `cell_modes.VARIANTS`.
      batch_size: Examples in a batch; None: as the function has it.
      sequence_length: Tokens of an example; None: as the workload has it.
      jit: A key of `validation.JIT`.
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
    validation.validate(config)
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
    columns = task.modes or cell_modes.default_modes(task.slow_modes)
    plain = [mode for mode in columns if cell_modes.VARIANTS[mode][1] is None]
    for framework in task.frameworks:
        ours = framework == "tfamp"
        supported = columns if ours else plain
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
    return None if config is None else cell_modes.with_mode(config, mode, 0).batch_size


def config_of(task: Any, cell: Cell, seed: int) -> config_dict.ConfigDict:
    """Returns the training configuration of a cell.

    Args:
      task: The cell's task, from `get_task`; it has a configuration.
      cell: The cell.
      seed: The seed of its repeat.
    """
    one = cell_modes.with_mode(task.config, cell.mode, seed)
    one.batch_size, one.jit_compile = cell.batch_size, validation.JIT[cell.jit]
    if cell.sequence_length:
        one.data.sequence_length = cell.sequence_length
    return one


def base(rows: Any, cell: Cell, config: Any) -> Cell | None:
    """Returns the cell that one is compared with: the first base that there is.

    It is tfamp's without XLA, unless the task asks for several choices of XLA; of the
    same shape or, if that mode was measured with another batch size alone, of that one.

    Args:
      rows: The cells that have figures.
      cell: One of them.
      config: The configuration of the benchmark.
    """
    twins = (_twin(rows, cell, mode, config) for mode in cell_modes.BASES)
    return next(filter(None, twins), None)


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
