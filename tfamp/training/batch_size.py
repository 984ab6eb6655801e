"""Finds the largest batch size of each precision mode that fits into memory.

Each trial is a process of its own that takes training steps: it may run out of memory,
be ended by Linux or crash, and nothing of that reaches the process that asks.
"""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from absl import flags, logging
from ml_collections import config_dict

from tfamp import errors
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
_FLAG = "find_batch_size"


# ---- The search ----


class Bracket(NamedTuple):
    """What a search found; multiples of `MULTIPLE`.

    Attributes:
      largest: Largest batch size that fits; 0 if none does.
      failing: Smallest that was found not to fit; None if the largest allowed fits.
    """

    largest: int
    failing: int | None


def search(
    fits: Callable[[int], bool],
    allowed: int,
    known: int = MULTIPLE,
    tolerance: float = 0.0,
) -> Bracket:
    """Searches for the largest batch size that fits.

    | trial                     | fits       | does not fit                     |
    |---------------------------|------------|----------------------------------|
    | `MULTIPLE`, then `known`  | go on      | bisect between this and the last |
    | the double of the last    | double     | bisect between this and the last |
    | the middle of the bracket | upper half | lower half                       |

    The bisection ends where the bracket is a `MULTIPLE` or a share `tolerance` of its
    lower end wide.

    Args:
      fits: Whether a batch size fits; that of a larger one implies a smaller one's.
      allowed: Largest batch size that is tried, rounded down to a multiple.
      known: A size that is expected to fit; a search from there is shorter.
      tolerance: Width of the final bracket, as a share of `largest`; 0 is exact.

    Returns:
      A `Bracket`; every size in it but 0 was tried.

    Raises:
      ValueError: If `allowed` is below `MULTIPLE`, or the tolerance is no share.
    """
    if allowed < MULTIPLE or not 0 <= tolerance < 1:
        raise ValueError(
            f"The largest batch size must be at least {MULTIPLE}, and the tolerance in "
            f"[0, 1). Received: {allowed} and {tolerance}."
        )
    top = _rounded(allowed)
    low, high = 0, None
    size = MULTIPLE
    while high is None and low < top:
        if fits(size):
            low, size = size, min(max(2 * size, _rounded(known)), top)
        else:
            high = size
    while high is not None and high - low > max(MULTIPLE, tolerance * low):
        middle = _rounded((low + high) // 2)
        if fits(middle):
            low = middle
        else:
            high = middle
    return Bracket(low, high)


def _rounded(size):
    return size // MULTIPLE * MULTIPLE


# ---- What is searched for, and what was found ----


class Settings(NamedTuple):
    """The arguments of `find_batch_size`; see there."""

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
        lines = [
            f"| mode | largest batch ({self.unit}) | does not fit | over float32 | "
            "peak memory | trials |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for size in self.sizes:
            peak = size["peak_bytes"]
            cells = (
                *(size["mode"], size["batch_size"], size["failing"] or "-"),
                f"{size['ratio']:.2f}" if size["ratio"] else "-",
                processes.mib(peak) if peak else "-",
                len(size["trials"]),
            )
            lines.append(f"| {' | '.join(map(str, cells))} |")
        notes = [f"- {note}" for note in (self.limit, *self.notes)]
        return "\n".join([*lines, "", *notes])

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

    Batch sizes are multiples of 8, for Tensor Cores: doubled from 8 until one does not
    fit, then bisected until the bracket is 8 or `TOLERANCE` wide. Steps are those of
    `fit`, with the configuration's optimizer, loss, loss scaling and XLA, on synthetic
    batches on one device. A process that takes more of the host than its limit ends
    itself; one that Linux ends, or whose allocations fail, does not fit, either.

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
    asked = Settings(tuple(modes or ()), memory_limit_mb, max_batch_size, steps)
    if workdir is not None:
        return run(config, workdir, asked, report)
    with tempfile.TemporaryDirectory() as folder:
        return run(config, folder, asked, report)


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
        one.benchmark = {"job": _FLAG, **asked}
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
    least = {"memory_limit_mb": 1, "max_batch_size": MULTIPLE, "steps": 1}
    for name, lowest in least.items():
        value = getattr(settings, name)
        if value is not None and value < lowest:
            raise ValueError(f"`{name}` must be at least {lowest}. Received: {value}.")
    if config.strategy != "none":
        raise ValueError(
            "A search measures one device. Received: config.strategy="
            f"{config.strategy!r}. Expected 'none'."
        )
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


def run(
    config,
    workdir: str | os.PathLike,
    settings: Settings,
    report: Callable[[str], object] = logging.info,
) -> BatchSizes:
    """Searches in a folder; see `find_batch_size`.

    Args:
      config: The configuration.
      workdir: The search's folder.
      settings: What to search for.
      report: Function that is told of each trial.
    """
    modes = plan(config, settings)
    shared = identity(config, settings)
    folder = run_files.open_folder(shared, workdir, "benchmark")
    with run_files.locked(folder):
        run_files.write_config(shared, folder)
        (folder / "cells").mkdir(exist_ok=True)
        memory, limit = processes.limits(settings.memory_limit_mb)
        trials = _Trials(shared, settings.steps, memory, folder, report)
        sizes: list[dict[str, Any]] = []
        for mode in modes:
            sizes.append(_search(mode, trials, settings, sizes))
        notes = "" if settings.modes else _mixed(shared)[1]
        found = BatchSizes(
            name=config.name,
            unit=trials.unit,
            limit=limit,
            sizes=tuple(sizes),
            notes=tuple(filter(None, [*trials.notes, notes, *_explain(settings)])),
        )
        run_files.write_text(folder / "report.md", found.to_markdown())
        text = json.dumps(found.to_dict(), indent=2)
        run_files.write_text(folder / "batch_sizes.json", text)
    return found


def _explain(settings):
    yield (
        f"a batch fits if a process of its own takes {settings.steps} training steps "
        "on synthetic batches, the step of `fit`, within the limit; multiples of 8 "
        f"(Tensor Cores), doubled from 8, then bisected to 8 or {TOLERANCE:.0%}; a run "
        "holds its data set beside, so leave a margin"
    )
    facts = doctor.describe()
    yield f"{facts.device}; TensorFlow {facts.facts['tensorflow']}"


def _search(mode, trials, settings, before):
    """Searches for one mode; the other modes' size is a good start."""
    made: list[dict[str, Any]] = []

    def fits(size):
        made.append(trials.make(mode, size))
        return not made[-1]["reason"]

    known = max((size["batch_size"] for size in before), default=0)
    bracket = search(fits, settings.max_batch_size, known, TOLERANCE)
    if not bracket.largest:
        raise errors.RunError(
            f"{bracket.failing} is the smallest batch size that is tried (multiples of "
            f"it suit Tensor Cores), and does not fit in {mode}. Received: "
            f"{made[-1]['reason']}. Expected more memory or a smaller model."
        )
    base = next((size for size in before if size["mode"] == "float32"), None)
    comparable = base and base["failing"] and bracket.failing
    peaks = {trial["batch_size"]: trial["peak_bytes"] for trial in made}
    return {
        "mode": mode,
        "batch_size": bracket.largest,
        "failing": bracket.failing,
        "ratio": bracket.largest / base["batch_size"] if comparable else None,
        "peak_bytes": peaks[bracket.largest],
        "trials": made,
    }


class _Trials:
    """The trials of a search; those in its folder are not made again."""

    def __init__(self, config, steps, memory, folder, report):
        self.config, self.steps, self.memory = config, steps, memory
        self.cells, self.report = folder / "cells", report
        self.unit, self.notes = "", []

    def make(self, mode, batch_size) -> dict[str, Any]:
        """Takes the steps of one batch size, and tells of it."""
        file = self.cells / f"train-{mode}-batch{batch_size}-repeat0.json"
        found = json.loads(file.read_text()) if file.exists() else {}
        again = " (tried before)"
        # A lack of memory says nothing where the limit was lower.
        if not found or found["reason"] and found["limit"] < self.memory.host:
            again, found = "", self._execute(mode, batch_size)
            run_files.write_text(file, json.dumps(found))
        reason, peak = found["reason"], found["peak_bytes"]
        told = f"does not fit: {reason}" if reason else f"fits: {processes.mib(peak)}"
        self.report(f"{mode}, batch {batch_size}{again}: {told}")
        self.unit = found.get("unit") or self.unit
        if found.get("description") not in (None, *self.notes):
            self.notes.append(found["description"])
        return {"batch_size": batch_size, "peak_bytes": peak, "reason": reason}

    def _execute(self, mode, batch_size):
        config = _config_of(self.config, mode, batch_size).to_dict()
        done = processes.call(train, config, self.steps, memory=self.memory)
        failed = {"reason": done.lack, "peak_bytes": None, "limit": self.memory.host}
        if not done.failure:
            # A peak can be shorter than what the process sees of itself.
            held, limit = done.value["host_bytes"], self.memory.host
            over = processes.over(held, limit) if held > limit else ""
            return {**failed, **done.value, "reason": over}
        if not done.lack:
            raise errors.RunError(
                "A trial failed, and not for lack of memory: "
                f"{mode}, batch {batch_size}. Received: {done.failure}"
            )
        return failed


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
        _FLAG,
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


def settings(others: Sequence[str], tiny: bool = False) -> Settings | None:
    """Returns what the flags ask for; None if they ask for no search.

    Args:
      others: Flags of jobs that were given; none goes with a search.
      tiny: Whether a run of seconds is wanted; a largest batch that was given counts.

    Raises:
      ValueError: If flags do not go together.
    """
    limit, largest = (flags.FLAGS[n] for n in ("memory_limit_mb", "max_batch_size"))
    if not flags.FLAGS[_FLAG].value:
        for flag in (limit, largest):
            if flag.present:
                raise ValueError(f"--{flag.name} belongs to --{_FLAG}.")
        return None
    if others:
        raise ValueError(
            f"--{_FLAG} is no part of a job. Received: --{', --'.join(others)}. The "
            "mode, XLA and the sequence length are the configuration's."
        )
    small = tiny and not largest.present
    return Settings((), limit.value, _TINY if small else largest.value)
