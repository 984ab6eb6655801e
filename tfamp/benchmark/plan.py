"""Which cells a benchmark has: task x mode x batch size x XLA, and the peers."""

from collections.abc import Iterator

from ml_collections import config_dict

from tfamp import errors, hardware, modes
from tfamp.benchmark import exchange, records, suite_config
from tfamp.precision import settings
from tfamp.training import base_config, benchmark_inputs, compare


def make(config: config_dict.ConfigDict) -> list[records.Cell]:
    """Returns the cells, those to be compared next to each other.

    Plain Keras has no graph rewrite, and PyTorch neither that nor XLA; a task without a
    twin in PyTorch has none of its cells (`exchange.reason_without_twin`).

    Args:
      config: The configuration of the benchmark.

    Raises:
      DataError: If a preset is missing or malformed.
      ValueError: If a setting makes no sense.
    """
    suite_config.validate(config)
    cells = []
    for name, task in config.tasks.items():
        check_task(task)
        sizes = task.batch_sizes or (task.config.batch_size,)
        cells += [cell for size in sizes for cell in _cells(name, task, size)]
    return list(dict.fromkeys(cells))


def _cells(name, task, batch_size) -> Iterator[records.Cell]:
    """The cells of one batch size: float32 first."""
    asked = task.modes or default_modes(task.slow_modes)
    for framework in task.frameworks:
        known = [mode for mode in asked if _has(framework, mode)]
        if framework == "torch" and exchange.reason_without_twin(task.config):
            continue
        for mode in known:
            yield records.Cell(name, framework, mode, batch_size, False)
        for mode in known if framework in task.xla_frameworks else ():
            if mode in task.xla:
                yield records.Cell(name, framework, mode, batch_size, True)


def _has(framework, mode):
    """Whether a framework has a mode of its own; rewrites are tfamp's."""
    _, rewrite = records.VARIANTS[mode]
    return framework == "tfamp" or rewrite is None


def default_modes(slow: bool = True) -> list[str]:
    """Returns every column that the devices of this host can compute.

    Args:
      slow: Whether those are among them whose format is slow here.
    """
    return [mode for mode in records.VARIANTS if _is_computed(mode, slow)]


def _is_computed(variant, slow):
    mode, rewrite = records.VARIANTS[variant]
    name = modes.get_mode(mode).compute_format
    support = hardware.format_support(name, hardware.read_devices())
    if mode != "float32" and not (support.fast or slow and support.supported):
        return False
    if rewrite is None:
        return True
    try:
        settings.resolve_rewrite(rewrite)
    except (errors.UnsupportedModeError, ValueError):
        return False
    return True


def check_task(task: config_dict.ConfigDict) -> None:
    """Raises what is wrong with a task's settings; loads no data and no weights.

    Args:
      task: From `suite_config.get_task`.

    Raises:
      DataError: If a preset is missing or malformed.
      ValueError: If a setting makes no sense.
    """
    config = task.config
    base_config.validate(config)
    if config.strategy != "none":
        raise ValueError(
            "Benchmarks measure one device. Received: "
            f"config.strategy={config.strategy!r}. Expected 'none'."
        )
    if task.synthetic:
        benchmark_inputs.check(config)


def config_of(
    task: config_dict.ConfigDict, cell: records.Cell, seed: int
) -> config_dict.ConfigDict:
    """Returns the training configuration of a cell.

    Args:
      task: The cell's task, from `suite_config.get_task`.
      cell: The cell.
      seed: The seed of its repeat.
    """
    one = with_mode(task.config, cell.mode, seed)
    one.batch_size, one.jit_compile = cell.batch_size, cell.xla
    return one


def with_mode(
    config: config_dict.ConfigDict, variant: str, seed: int
) -> config_dict.ConfigDict:
    """Returns a training configuration in a column's mode.

    Args:
      config: The configuration of a run.
      variant: A key of `records.VARIANTS`.
      seed: The run's seed.
    """
    mode, rewrite = records.VARIANTS[variant]
    one = config.copy_and_resolve_references()
    one.precision.graph_rewrite = rewrite is not None
    if rewrite:
        one.precision.overrides = ()  # A rewrite knows no layers.
    return compare.config_of(one, mode, seed, one.precision.loss_scale.enabled)
