"""Finds the largest batch size of each precision mode that fits into memory.

Each trial is a process of its own that takes training steps: it may run out of memory,
be ended by Linux or crash, and nothing of that reaches the process that asks.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from absl import flags, logging
from ml_collections import config_dict

from tfamp import checks, errors, functions, tables
from tfamp.diagnostics import doctor
from tfamp.precision import control
from tfamp.training import (
    base_config,
    compare,
    measured_files,
    processes,
    run_files,
    synthetic,
)

SCHEMA_VERSION = 3
# Tensor Cores work on multiples of 8; batches between them would gain nothing.
MULTIPLE = 8
TOLERANCE = 0.03  # Two runs of a process differ by as much.
_TINY = 16  # Largest batch of a run of seconds.
# What goes with --find_batch_size.
FLAGS = ("memory_limit_mb", "max_batch_size", "effective_batch")


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


def divisors(fits: Callable[[int], bool], batch: int) -> tuple[int, int | None]:
    """Searches for the largest divisor of a batch that fits: the whole, then bisects.

    Args:
      fits: As for `search`.
      batch: The batch that one update of the weights is to have.

    Returns:
      As `search`; the second is the next larger divisor.
    """
    sizes = [size for size in range(1, batch + 1) if batch % size == 0]
    low, high = -1, len(sizes)
    while high - low > 1:
        middle = (low + high) // 2 if high < len(sizes) else high - 1
        low, high = (middle, high) if fits(sizes[middle]) else (low, middle)
    return sizes[low] if low >= 0 else 0, sizes[high] if high < len(sizes) else None


# ---- What is searched for, and what was found ----


class Settings(NamedTuple):
    """Arguments of `find_batch_size`; see there. `limit` is in bytes."""

    modes: tuple[str, ...] = ()
    limit: int | None = None
    effective_batch: int | None = None
    max_batch_size: int = 2**16
    steps: int = 2


class BatchSizes(NamedTuple):
    """The largest batch sizes as plain data.

    Attributes:
      name: Name of the configuration or function.
      unit: What a batch holds: "sequences", "images", "rows", "examples".
      limit: The memory that the batch is to fit into, in words.
      sizes: A dict for each mode, float32 first if it was searched: mode; batch_size
        (the largest that fits); accumulation_steps (batches of one update of the
        weights); failing (the smallest found not to fit; None if the largest allowed
        fits); ratio (over float32's; None without); peak_bytes (of batch_size); trials
        (dicts of batch_size, peak_bytes and reason).
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
                "accumulation steps": str(size["accumulation_steps"]),
                "does not fit": str(size["failing"] or "-"),
                "over float32": f"{size['ratio']:.2f}" if size["ratio"] else "-",
                "peak memory": processes.mib(size["peak_bytes"]),
                "trials": str(len(size["trials"])),
            }
            for size in self.sizes
        ]
        notes = [f"- {note}" for note in (self.limit, *self.notes)]
        return "\n".join([tables.of_dicts(rows), "", *notes])

    __str__ = to_text

    def to_markdown(self) -> str:
        """Returns `report.md`."""
        return f"# {self.name}: largest batch size\n\n{self.to_text()}\n"


def find_batch_size(
    workload: str | Callable[..., Any] | config_dict.ConfigDict,
    limit: str | int | None = None,
    *,
    modes: Sequence[str] | None = None,
    effective_batch: int | None = None,
    max_batch_size: int = Settings._field_defaults["max_batch_size"],
    steps: int = Settings._field_defaults["steps"],
    workdir: str | os.PathLike | None = None,
    report: Callable[[str], object] = logging.info,
) -> BatchSizes:
    """Finds the largest batch size of each mode whose training steps fit into memory.

    Batch sizes are multiples of 8, for Tensor Cores: doubled until one does not fit,
    then bisected. Steps are those of `fit` on one device, with loss scaling and XLA as
    the model is compiled. A process that takes more of the host than its limit ends
    itself; one that Linux ends, or whose allocations fail, does not fit, either.

    ```python
    def build(batch_size):
        model = keras.Sequential([keras.layers.Dense(1024), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        data = tf.data.Dataset.from_tensors((tf.zeros((256,)), tf.zeros((1,))))
        return model, data.repeat().batch(batch_size)

    print(tfamp.find_batch_size("my_script:build", limit="2GiB"))
    ```

    Args:
      workload: A function with an argument `batch_size` that returns a compiled model
        and a dataset of batches, or its name, "module:function" or "file.py:function";
        or a configuration from `configs/`, of which synthetic batches are made.
      limit: Memory of a process, "2GiB" or a number of bytes: on a host with a GPU, of
        the first GPU, else of the host, programs included. None: all of the GPU, or
        80 % of what the host has available.
      modes: Precision modes; None: float32 and the mixed one for this hardware.
      effective_batch: Examples of one update of the weights. The answer is then the
        largest divisor that fits, with `gradient_accumulation_steps` for the rest.
      max_batch_size: Largest batch size that is tried.
      steps: Updates of the weights of a trial.
      workdir: Folder for `batch_sizes.json`, `report.md` and the trials, which a second
        call on the same machine does not repeat. None: nothing is kept.
      report: Function that is told of each trial.

    Returns:
      A `BatchSizes`; `print` shows its table.

    Raises:
      DataError: If the preset is missing or malformed.
      RunError: If not even the smallest fits, if a trial fails for anything but memory,
        or if the folder cannot be written or holds anything but this search.
      ValueError: If a setting makes no sense, or there is no such function.
    """
    asked = Settings(
        *(tuple(modes or ()), processes.parse_size(limit), effective_batch),
        *(max_batch_size, steps),
    )
    if not isinstance(workload, config_dict.ConfigDict):
        workload = config_dict.ConfigDict({"function": functions.name_of(workload)})
    modes = plan(workload, asked)
    shared = identity(workload, asked)
    with run_files.benchmark_folder(shared, workdir) as folder:
        memory, words = processes.limits(asked.limit)
        machine = doctor.describe()
        held = measured_files.place(machine)
        held["function"] = measured_files.fingerprint(shared.get("function", ""))
        made = _Search(shared, asked, memory, folder / "cells", held, report)
        for mode in modes:
            made.search(mode)
        rule = (
            f"divisors of {effective_batch}, bisected"
            if effective_batch
            else "multiples of 8 (Tensor Cores), doubled, then bisected to 8 or "
            f"{TOLERANCE:.0%}"
        )
        notes = [
            made.figures["description"],
            "" if asked.modes else _mixed(shared)[1],
            f"a batch fits if a process of its own takes {asked.steps} training "
            f"steps, the step of `fit`, within the limit; {rule}; a run holds its data "
            "set beside, so leave a margin",
            f"{machine.device}; TensorFlow {machine.facts['tensorflow']}",
        ]
        found = BatchSizes(
            name=shared.name,
            unit=made.figures["unit"],
            limit=words,
            sizes=tuple(made.sizes),
            notes=tuple(filter(None, notes)),
        )
        run_files.write_text(folder / "report.md", found.to_markdown())
        text = json.dumps(found.to_dict(), indent=2)
        run_files.write_text(folder / "batch_sizes.json", text)
    return found


def identity(workload: config_dict.ConfigDict, asked: Settings):
    """Returns the configuration of a search's folder; it names what trials share.

    Args:
      workload: The configuration of the model, or {"function": its name}.
      asked: Its steps; other modes, limits and batches go on from there.
    """
    if "function" in workload:
        one = workload.copy_and_resolve_references()
        one.name = workload.function.rpartition(":")[2]
    else:
        one = base_config.settle_rewrite(workload)
        with one.unlocked():
            one.batch_size = base_config.get_config().batch_size  # It has no use here.
            one.float32.batch_size = None
            one.name = f"{workload.name}-batch-size"
    with one.unlocked():
        one.benchmark = {"job": "find_batch_size", "steps": asked.steps}
    return one


def plan(workload: config_dict.ConfigDict, asked: Settings) -> tuple[str, ...]:
    """Returns the modes that are searched.

    Args:
      workload: As for `identity`.
      asked: What to search for.

    Raises:
      DataError: If the preset is missing or malformed.
      ValueError: If a setting makes no sense.
    """
    checks.check_count("max_batch_size", asked.max_batch_size, smallest=MULTIPLE)
    checks.check_count("steps", asked.steps)
    if asked.effective_batch is not None:
        checks.check_count("effective_batch", asked.effective_batch)
    processes.limits(asked.limit)
    modes = asked.modes or ("float32", _mixed(workload)[0])
    if "function" not in workload:
        synthetic.validate(workload)
        synthetic.check(_config_of(workload, mode, MULTIPLE) for mode in modes)
    return modes


def _mixed(workload):
    if "function" in workload:
        return compare.mixed_mode("auto")
    precision = base_config.settle_rewrite(workload).precision
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

    def __init__(self, workload, asked, memory, folder, held, report):
        self.workload, self.asked, self.memory = workload, asked, memory
        self.folder, self.held, self.report = folder, held, report
        self.sizes, self.figures = [], {}

    def search(self, mode):
        """Searches for one mode; the other modes' size is a good start."""
        trials: list[dict[str, Any]] = []

        def fits(size):
            trials.append(self._try(mode, size))
            return not trials[-1]["reason"]

        if whole := self.asked.effective_batch:
            largest, failing = divisors(fits, whole)
        else:
            start = max((each["batch_size"] for each in self.sizes), default=MULTIPLE)
            largest, failing = search(fits, self.asked.max_batch_size, start)
        if not largest:
            raise errors.RunError(
                f"{failing} is the smallest batch size that is tried, and does not fit "
                f"in {mode}. Received: {trials[-1]['reason']}. Expected more memory or "
                "a smaller model."
            )
        base = next((each for each in self.sizes if each["mode"] == "float32"), None)
        comparable = base and base["failing"] and failing
        peaks = {trial["batch_size"]: trial["peak_bytes"] for trial in trials}
        self.sizes.append(
            {
                "mode": mode,
                "batch_size": largest,
                "accumulation_steps": self._accumulation(largest),
                "failing": failing,
                "ratio": largest / base["batch_size"] if comparable else None,
                "peak_bytes": peaks[largest],
                "trials": trials,
            }
        )

    def _accumulation(self, size):
        if whole := self.asked.effective_batch:
            return whole // size
        optimizer = self.workload.get("optimizer")
        return optimizer.accumulation_steps if optimizer else 1

    def _try(self, mode, size):
        """Takes the steps of one batch size, and tells of it."""
        count = self._accumulation(size)
        file = self.folder / f"train-{mode}-batch{size}-accumulated{count}.json"
        found = measured_files.read(file, self.held) or {}
        again = " (tried before)"
        # A lack of memory says nothing where there was less of it.
        before = found.get("limits", self.memory)
        now, then = ([each or math.inf for each in x] for x in (self.memory, before))
        if not found or found["lack"] and now > then:
            again, found = "", self._execute(mode, size, count)
            measured_files.write(file, self.held, found)
        peak, reason = found["peak_bytes"], found["lack"]
        # There may have been more of it; and a peak can be too short to be seen.
        for kind, most in self.memory._asdict().items():
            if most and not reason and (found[f"{kind}_bytes"] or 0) > most:
                reason = processes.over(found[f"{kind}_bytes"], most)
        told = f"does not fit: {reason}" if reason else f"fits: {processes.mib(peak)}"
        self.report(f"{mode}, batch {size}{again}: {told}")
        self.figures = self.figures if reason else found
        return {"batch_size": size, "peak_bytes": peak, "reason": reason}

    def _execute(self, mode, size, count):
        what = self.workload.get("function")
        if what is None:
            config = _config_of(self.workload, mode, size)
            config.optimizer.accumulation_steps = count
            what = config.to_dict()
        given = what, mode, size, count, self.asked.steps
        done = processes.call(train, *given, memory=self.memory)
        if done.failure and not done.lack:
            raise errors.RunError(
                "A trial failed, and not for lack of memory: "
                f"{mode}, batch {size}. Received: {done.failure}"
            )
        figures = done.value or {"peak_bytes": None}
        return {**figures, "lack": done.lack, "limits": list(self.memory)}


def train(
    what: dict[str, Any] | str, mode: str, size: int, count: int, steps: int
) -> dict[str, Any]:
    """Takes training steps in this process.

    Args:
      what: The configuration of this trial as dicts, or the name of a function.
      mode: The precision mode of the function.
      size: The batch size that the function is asked for.
      count: Batches of an update of the weights.
      steps: Updates.

    Returns:
      Its peaks in bytes ("peak_bytes" of the GPU, where there is one), the unit and the
      model's description.

    Raises:
      TypeError: If the function returns anything but a compiled model and batches of
        that size.
    """
    if isinstance(what, str):
        with control.enabled(mode):
            made = synthetic.from_function(what, {"batch_size": size}, "auto")
            if made.examples != size:
                raise TypeError(
                    f"{what} must return batches of the size that it is asked for. "
                    f"Received: {made.examples} examples for batch_size={size}."
                )
            if count > 1:
                optimizer = made.model.optimizer
                optimizer = getattr(optimizer, "inner_optimizer", optimizer)
                optimizer.gradient_accumulation_steps = count
            _fit(made, steps * count)
    else:
        config = config_dict.ConfigDict(what)
        with synthetic.in_precision(config):
            made = synthetic.from_config(config, steps)
            _fit(made, steps * count)
    host, device = processes.peak_host(), processes.peak_device()
    return {
        "host_bytes": host,
        "device_bytes": device,
        "peak_bytes": host if device is None else device,
        "unit": made.unit,
        "description": f"{made.description}; {made.model.count_params():,} parameters",
    }


def _fit(made, batches):
    made.model.fit(made.batches, steps_per_epoch=batches, shuffle=False, verbose=0)


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
    flags.DEFINE_integer(
        "effective_batch",
        None,
        "Examples of one update: find the largest part of them that fits, and how many "
        "of them are to be accumulated.",
        lower_bound=1,
    )


def settings(tiny: bool = False) -> Settings:
    """Returns what the flags ask for.

    Args:
      tiny: Whether a run of seconds is wanted; a largest batch that was given counts.
    """
    limit, largest, whole = (flags.FLAGS[name] for name in FLAGS)
    small = tiny and not largest.present
    return Settings(
        limit=limit.value and limit.value * processes.MIB,
        effective_batch=whole.value,
        max_batch_size=_TINY if small else largest.value,
    )
