"""Trials of batch sizes, each in a separate process, and their order."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ml_collections import config_dict

from tfamp import errors
from tfamp.precision import control
from tfamp.training import compare, measured_files, processes, synthetic, trainer

# Tensor Cores work on multiples of 8; batches between them would gain nothing.
MULTIPLE = 8
TOLERANCE = 0.03  # Two runs of a process differ by as much.


class Settings(NamedTuple):
    """Arguments of `find_batch_size`; see there. `limit` is in bytes."""

    modes: tuple[str, ...] = ()
    limit: int | None = None
    effective_batch: int | None = None
    max_batch_size: int = 2**16
    steps: int = 2


def search(
    fits: Callable[[int], bool], sizes: Sequence[int], start: int, tolerance: float
) -> tuple[int, int | None]:
    """Searches for the largest batch size that fits: doubles its place, then bisects.

    Args:
      fits: Whether a batch size fits; that of a larger one implies a smaller one's.
      sizes: Those that may be tried, ascending.
      start: Place of the first that is tried; of the last one if there are fewer.
      tolerance: Share of a size by which the next larger one need not be distinguished.

    Returns:
      (the largest that fits, 0 if none does; the smallest that was found not to fit,
      None if the largest allowed fits).
    """
    low, high, place = -1, len(sizes), min(start, len(sizes) - 1)
    while high - low > 1:
        low, high = (place, high) if fits(sizes[place]) else (low, place)
        if high == len(sizes):
            place = min(2 * place + 1, high - 1)
            continue
        place = (low + high) // 2
        if low >= 0 and sizes[high] - sizes[low] <= tolerance * sizes[low]:
            break
    return sizes[low] if low >= 0 else 0, sizes[high] if high < len(sizes) else None


def config_of(config, mode: str, batch_size: int) -> config_dict.ConfigDict:
    """Returns the configuration of a trial.

    Args:
      config: The configuration that is searched for.
      mode: The trial's mode.
      batch_size: The trial's batch size.
    """
    scaling = config.precision.loss_scale.enabled
    one = compare.config_of(config, mode, config.seed, scaling)
    one.batch_size = batch_size
    return one


def what(workload, keywords: dict[str, Any], size: int, count: int):
    """Returns what `train` takes first: a trial's configuration, or a function's name.

    Args:
      workload: As `batch_size.identity` returns it.
      keywords, size, count: As of `train`.
    """
    if "function" in workload:
        return workload.function
    config = config_of(workload, keywords["mode"], size)
    config.precision.update(keywords)
    config.optimizer.accumulation_steps = count
    return config.to_dict()


class Search:
    """The searches in a folder, whose trials are not made again.

    Args:
      workload: As `batch_size.identity` returns it.
      asked: What to search for.
      memory: What a process may hold.
      folder: Where the trials' files are.
      held: What they hold for; see `measured_files`.
      report: Function called with a line on each trial.

    Attributes:
      sizes: What was found; see `batch_size.BatchSizes`.
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
            sizes = [size for size in range(1, whole + 1) if whole % size == 0]
            largest, failing = search(fits, sizes, len(sizes), 0.0)
        else:
            sizes = range(MULTIPLE, self.asked.max_batch_size + 1, MULTIPLE)
            start = max((each["batch_size"] for each in self.sizes), default=MULTIPLE)
            largest, failing = search(fits, sizes, start // MULTIPLE - 1, TOLERANCE)
        if not largest:
            raise errors.RunError(
                f"Even the smallest batch size tried, {failing}, does not fit in "
                f"{mode}. Received: {trials[-1]['reason']}. Expected more memory or a "
                "smaller model."
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
        """Takes the steps of one batch size, and reports it."""
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
        keywords = {"mode": mode}
        given = what(self.workload, keywords, size, count), keywords, size, count
        done = processes.call(train, *given, self.asked.steps, memory=self.memory)
        if done.failure and not done.lack:
            raise errors.RunError(
                f"A trial failed for another reason than memory: {mode}, batch {size}. "
                f"Received: {done.failure}"
            )
        figures = done.value or {"peak_bytes": None}
        return {**figures, "lack": done.lack, "limits": list(self.memory)}


def train(
    what: dict[str, Any] | str,
    keywords: dict[str, Any],
    size: int,
    count: int,
    steps: int,
) -> dict[str, Any]:
    """Takes training steps in this process.

    Args:
      what: The configuration of this trial as dicts, or the name of a function.
      keywords: Of `enable`: "mode", and others. A configuration has its own.
      size: The batch size that the function is called with.
      count: Batches of an update of the weights.
      steps: Updates.

    Returns:
      Its peaks in bytes ("peak_bytes" of the GPU, where there is one), "seconds" of an
      update after the first, the unit and the model's description.

    Raises:
      TypeError: If the function returns anything but a compiled model and batches of
        that size.
    """
    with built(what, keywords, size, count, steps) as made:
        seconds = []
        for _ in range(steps):
            begun = time.perf_counter()
            fit = {"steps_per_epoch": count, "shuffle": False, "verbose": 0}
            made.model.fit(made.batches, **fit)
            seconds.append(time.perf_counter() - begun)
    host, device = processes.peak_host(), processes.peak_device()
    return {
        "host_bytes": host,
        "device_bytes": device,
        "peak_bytes": host if device is None else device,
        "seconds": statistics.median(seconds[1:] or seconds),
        "unit": made.unit,
        "description": f"{made.description}; {made.model.count_params():,} parameters",
    }


@contextlib.contextmanager
def built(
    what: dict[str, Any] | str,
    keywords: dict[str, Any],
    size: int,
    count: int,
    steps: int,
) -> Iterator[synthetic.Workload]:
    """Scopes the precision of a trial, and yields its model and batches.

    Args:
      what, keywords, size, count, steps: As of `train`.
    """
    if not isinstance(what, str):
        config = config_dict.ConfigDict(what)
        with trainer.enabled(config.precision):
            yield synthetic.from_config(config, steps)
        return
    with control.enabled(**keywords):
        made = synthetic.from_function(what, {"batch_size": size}, "auto")
        if made.examples != size:
            raise TypeError(
                f"{what} must return batches of the requested size. "
                f"Received: {made.examples} examples for batch_size={size}."
            )
        if count > 1:
            optimizer = made.model.optimizer
            optimizer = getattr(optimizer, "inner_optimizer", optimizer)
            optimizer.gradient_accumulation_steps = count
        yield made
