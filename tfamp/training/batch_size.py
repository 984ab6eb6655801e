"""Finds the largest batch size of each precision mode that fits into memory.

Each trial is a process of its own that takes training steps: it may run out of memory,
be ended by Linux or crash, and nothing of that reaches the process that asks.
"""

import json
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from absl import flags, logging
from ml_collections import config_dict

from tfamp import errors, tables
from tfamp.diagnostics import doctor
from tfamp.training import (
    base_config,
    compare,
    processes,
    run_files,
    synthetic,
)

SCHEMA_VERSION = 2
# Tensor Cores work on multiples of 8; batches between them would gain nothing.
MULTIPLE = 8
TOLERANCE = 0.03  # Two runs of a process differ by as much.
_TINY = 16  # Largest batch of a run of seconds.
# What goes with --find_batch_size.
FLAGS = ("memory_limit_mb", "max_batch_size")


# ---- The search ----


def search(
    fits: Callable[[int], bool], allowed: int, start: int = MULTIPLE
) -> tuple[int, int | None]:
    """Searches for the largest multiple of 8 that fits: doubles, then bisects.

    Args:
      fits: Whether a batch size fits; that of a larger one implies a smaller one's.
      allowed: Largest batch size that is tried, rounded down to a multiple.
      start: The first that is tried, a multiple.

    Returns:
      (the largest that fits, 0 if none does; the smallest that was found not to fit,
      None if the largest allowed fits). They are 8 or `TOLERANCE` apart.
    """
    top = allowed // MULTIPLE * MULTIPLE
    low, high = 0, None
    while high is None and low < top:
        size = min(max(2 * low, start), top)
        low, high = (size, None) if fits(size) else (low, size)
    while high is not None and high - low > max(MULTIPLE, TOLERANCE * low):
        middle = (low + high) // (2 * MULTIPLE) * MULTIPLE
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, high


# ---- What is searched for, and what was found ----


class Settings(NamedTuple):
    """Arguments of `find_batch_size`; see there."""

    modes: tuple[str, ...] = ()
    memory_limit_mb: int | None = None
    max_batch_size: int = 2**16
    steps: int = 2


class BatchSizes(NamedTuple):
    """The largest batch sizes as plain data.

    Attributes:
      name: Name of the configuration.
      unit: What a batch holds: "sequences", "images", "rows".
      limit: The memory that the batch is to fit into, in words.
      sizes: A dict for each mode, float32 first if it was searched: mode; batch_size
        (the largest that fits); failing (the smallest found not to fit; None if the
        largest allowed fits); ratio (over float32's; None without); peak_bytes (of
        batch_size); trials (dicts of batch_size, peak_bytes and reason).
      notes: Lines on the model, the mode and the machine.
    """

    name: str
    unit: str
    limit: str
    sizes: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns what `batch_sizes.json` holds."""
        return {"schema_version": SCHEMA_VERSION, **self._asdict()}

    def to_text(self) -> str:
        """Returns the table and the notes."""
        rows = [
            {
                "mode": size["mode"],
                f"largest batch ({self.unit})": str(size["batch_size"]),
                "does not fit": str(size["failing"] or "-"),
                "over float32": f"{size['ratio']:.2f}" if size["ratio"] else "-",
                "peak memory": processes.mib(size["peak_bytes"]),
                "trials": str(len(size["trials"])),
            }
            for size in self.sizes
        ]
        notes = [f"- {note}" for note in (self.limit, *self.notes)]
        return "\n".join([tables.of_dicts(rows), "", *notes])

    def to_markdown(self) -> str:
        """Returns `report.md`."""
        return f"# {self.name}: largest batch size\n\n{self.to_text()}\n"


def find_batch_size(
    config,
    modes: Sequence[str] | None = None,
    *,
    memory_limit_mb: int | None = None,
    max_batch_size: int = Settings._field_defaults["max_batch_size"],
    steps: int = Settings._field_defaults["steps"],
    workdir: str | os.PathLike | None = None,
    report: Callable[[str], object] = logging.info,
) -> BatchSizes:
    """Finds the largest batch size of each mode whose training steps fit into memory.

    Batch sizes are multiples of 8, for Tensor Cores: doubled until one does not fit,
    then bisected. Steps are those of `fit`, with the configuration's optimizer, loss,
    loss scaling and XLA, on synthetic batches on one device. A process that takes more
    of the host than its limit ends itself; one that Linux ends, or whose allocations
    fail, does not fit, either.

    Args:
      config: The configuration; its data and its batch size are not used.
      modes: Precision modes; None: float32 and the configuration's mixed one, as a
        comparison chooses it.
      memory_limit_mb: Memory of a process in MiB: on a host with a GPU, of the first
        GPU, else of the host. None: all of the GPU, or 80 % of what the host has
        available.
      max_batch_size: Largest batch size that is tried.
      steps: Training steps of a trial; with accumulation, whole windows.
      workdir: Folder for `batch_sizes.json`, `report.md` and the trials, which a second
        call does not repeat. None: nothing is kept.
      report: Function that is told of each trial.

    Returns:
      A `BatchSizes`.

    Raises:
      DataError: If the preset is missing or malformed.
      RunError: If not even 8 fits, if a trial fails for anything but memory, or if the
        folder cannot be written or holds anything but this search.
      ValueError: If a setting makes no sense.
    """
    settings = Settings(tuple(modes or ()), memory_limit_mb, max_batch_size, steps)
    modes = plan(config, settings)
    shared = identity(config, settings)
    with run_files.benchmark_folder(shared, workdir) as folder:
        memory, limit = processes.limits(settings.memory_limit_mb)
        made = _Search(shared, settings, memory, folder / "cells", report)
        for mode in modes:
            made.search(mode)
        machine = doctor.describe()
        notes = [
            made.figures["description"],
            "" if settings.modes else _mixed(shared)[1],
            f"a batch fits if a process of its own takes {settings.steps} training "
            "steps on synthetic batches, the step of `fit`, within the limit; "
            f"multiples of 8 (Tensor Cores), doubled, then bisected to 8 or "
            f"{TOLERANCE:.0%}; a run holds its data set beside, so leave a margin",
            f"{machine.device}; TensorFlow {machine.facts['tensorflow']}",
        ]
        found = BatchSizes(
            name=config.name,
            unit=made.figures["unit"],
            limit=limit,
            sizes=tuple(made.sizes),
            notes=tuple(filter(None, notes)),
        )
        run_files.write_text(folder / "report.md", found.to_markdown())
        text = json.dumps(found.to_dict(), indent=2)
        run_files.write_text(folder / "batch_sizes.json", text)
    return found


def identity(config, settings: Settings):
    """Returns the configuration of a search's folder; it names what trials share.

    Args:
      config: The configuration of the model.
      settings: Its limit and steps; more modes, or a larger batch, go on from there.
    """
    one = base_config.settle_rewrite(config)
    with one.unlocked():
        one.batch_size = base_config.get_config().batch_size  # It has no use here.
        one.float32.batch_size = None
        one.name = f"{config.name}-batch-size"
        names = ("memory_limit_mb", "steps")
        asked = {name: getattr(settings, name) for name in names}
        one.benchmark = {"job": "find_batch_size", **asked}
    return one


def plan(config, settings: Settings) -> tuple[str, ...]:
    """Returns the modes that are searched.

    Args:
      config: The configuration.
      settings: What to search for.

    Raises:
      DataError: If the preset is missing or malformed.
      ValueError: If a setting makes no sense.
    """
    if settings.max_batch_size < MULTIPLE:
        raise ValueError(
            f"`max_batch_size` must be at least {MULTIPLE}. Received: "
            f"{settings.max_batch_size}."
        )
    synthetic.validate(config)
    processes.limits(settings.memory_limit_mb)
    modes = settings.modes or ("float32", _mixed(config)[0])
    synthetic.check(_config_of(config, mode, MULTIPLE) for mode in modes)
    return modes


def _mixed(config):
    precision = base_config.settle_rewrite(config).precision
    return compare.mixed_mode(precision.mode, precision.graph_rewrite)


def _config_of(config, mode, batch_size):
    scaling = config.precision.loss_scale.enabled
    one = compare.config_of(config, mode, config.seed, scaling)
    one.batch_size = batch_size
    return one


class _Search:
    """The searches in a folder, whose trials are not made again.

    Attributes:
      sizes: What was found; see `BatchSizes`.
      figures: Of the last trial that fitted; see `train`.
    """

    def __init__(self, config, settings, memory, folder, report):
        self.config, self.settings, self.memory = config, settings, memory
        self.folder, self.report = folder, report
        self.sizes, self.figures = [], {}

    def search(self, mode):
        """Searches for one mode; the other modes' size is a good start."""
        trials: list[dict[str, Any]] = []

        def fits(size):
            trials.append(self._try(mode, size))
            return not trials[-1]["reason"]

        start = max((each["batch_size"] for each in self.sizes), default=MULTIPLE)
        largest, failing = search(fits, self.settings.max_batch_size, start)
        if not largest:
            raise errors.RunError(
                f"{failing} is the smallest batch size that is tried (multiples of "
                f"it suit Tensor Cores), and does not fit in {mode}. Received: "
                f"{trials[-1]['reason']}. Expected more memory or a smaller model."
            )
        base = next((each for each in self.sizes if each["mode"] == "float32"), None)
        comparable = base and base["failing"] and failing
        peaks = {trial["batch_size"]: trial["peak_bytes"] for trial in trials}
        self.sizes.append(
            {
                "mode": mode,
                "batch_size": largest,
                "failing": failing,
                "ratio": largest / base["batch_size"] if comparable else None,
                "peak_bytes": peaks[largest],
                "trials": trials,
            }
        )

    def _try(self, mode, size):
        """Takes the steps of one batch size, and tells of it."""
        file = self.folder / f"train-{mode}-batch{size}-repeat0.json"
        found = json.loads(file.read_text()) if file.exists() else {}
        again = " (tried before)"
        # A lack of memory says nothing where the limit was lower.
        if not found or found["reason"] and found["limit"] < self.memory.host:
            again, found = "", self._execute(mode, size)
            run_files.write_text(file, json.dumps(found))
        reason, peak = found["reason"], found["peak_bytes"]
        told = f"does not fit: {reason}" if reason else f"fits: {processes.mib(peak)}"
        self.report(f"{mode}, batch {size}{again}: {told}")
        self.figures = self.figures if reason else found
        return {"batch_size": size, "peak_bytes": peak, "reason": reason}

    def _execute(self, mode, size):
        config = _config_of(self.config, mode, size).to_dict()
        done = processes.call(train, config, self.settings.steps, memory=self.memory)
        if done.failure and not done.lack:
            raise errors.RunError(
                "A trial failed, and not for lack of memory: "
                f"{mode}, batch {size}. Received: {done.failure}"
            )
        figures, limit = done.value or {"peak_bytes": None}, self.memory.host
        # A peak can be shorter than what the process sees of itself.
        held = figures.get("host_bytes", 0)
        over = processes.over(held, limit) if held > limit else ""
        return {**figures, "reason": done.lack or over, "limit": limit}


def train(plain: dict[str, Any], steps: int) -> dict[str, Any]:
    """Takes training steps on synthetic batches in this process.

    Args:
      plain: The configuration as dicts.
      steps: How many; with accumulation, windows.

    Returns:
      Its peaks in bytes ("peak_bytes" of the GPU, where there is one), the unit and the
      model's description.
    """
    config = config_dict.ConfigDict(plain)
    batches = steps * config.optimizer.accumulation_steps
    with synthetic.in_precision(config):
        source = synthetic.create(config)
        model = synthetic.compile_model(source, config, batches)
        model.fit(source.batches, steps_per_epoch=batches, shuffle=False, verbose=0)
    host, device = processes.peak_host(), processes.peak_device()
    return {
        "host_bytes": host,
        "peak_bytes": host if device is None else device,
        "unit": source.unit,
        "description": f"{source.description}; {model.count_params():,} parameters",
    }


# ---- The command line ----


def define() -> None:
    """Defines the flags."""
    flags.DEFINE_bool(
        "find_batch_size",
        False,
        "Instead of a job: find the largest batch size that fits into memory, in "
        "float32 and in the mixed mode, in processes of their own.",
    )
    flags.DEFINE_integer(
        "memory_limit_mb",
        None,
        "Memory in MiB that the batch is to fit into: of the first GPU, else of the "
        "process; default: all of the GPU, else most of what the host has available.",
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "max_batch_size",
        Settings().max_batch_size,
        "Largest batch size that is tried.",
        lower_bound=MULTIPLE,
    )


def settings(tiny: bool = False) -> Settings:
    """Returns what the flags ask for.

    Args:
      tiny: Whether a run of seconds is wanted; a largest batch that was given counts.
    """
    limit, largest = (flags.FLAGS[name] for name in FLAGS)
    small = tiny and not largest.present
    return Settings((), limit.value, _TINY if small else largest.value)
