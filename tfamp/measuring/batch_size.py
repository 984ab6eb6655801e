"""Finds the largest batch size of each precision mode that fits into memory.

Each trial is a separate process that takes training steps: it may run out of memory,
be ended by Linux or crash, and nothing of that reaches the process that asks.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ml_collections import config_dict

from tfamp import checks, errors, progress, tables
from tfamp.facts import modes as precision_modes
from tfamp.measuring import process_memory, training_steps, workloads
from tfamp.runs import run_files

SCHEMA_VERSION = 3
_MULTIPLE = training_steps.MULTIPLE
TOLERANCE = 0.03  # Two runs of a process differ by as much.
_BISECTED = 7  # Trials at most until twofold sizes are as near.
MAX_BATCH_SIZE, STEPS = 2**16, 2


class BatchSizes(NamedTuple):
    """The largest batch sizes as plain data.

    Attributes:
      name: Name of the configuration or function.
      unit: What a batch holds: "sequences", "images", "rows", "examples".
      limit: The memory that the batch must fit into, as text.
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
                "peak memory": process_memory.mib(size["peak_bytes"]),
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
    max_batch_size: int = MAX_BATCH_SIZE,
    steps: int = STEPS,
    workdir: str | os.PathLike | None = None,
    verbose: int = 1,
) -> BatchSizes:
    """Finds the largest batch size of each mode whose training steps fit into memory.

    Batch sizes are multiples of 8, for Tensor Cores. They are doubled until one does
    not fit, then bisected. Steps are those of `fit` on one device, with loss scaling
    and XLA as the model is compiled. A trial does not fit if its process exceeds the
    limit of host memory, is ended by Linux, or cannot allocate.

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
        and a dataset of batches, or its name, "module:function" or "file.py:function".
        Or a configuration from `configs/`, for which synthetic batches are made.
      limit: Memory limit of a process, "2GiB" or a number of bytes. It applies to the
        first GPU, or without a GPU to host memory, programs included. None: all memory
        of the GPU, or 80 % of the available host memory.
      modes: Precision modes; None: float32 and the mixed mode for this hardware.
      effective_batch: Examples of one update of the weights. The result is then the
        largest divisor that fits, with `gradient_accumulation_steps` for the rest.
      max_batch_size: Largest batch size to try.
      steps: Updates of the weights in a trial.
      workdir: Folder for `batch_sizes.json`, `report.md` and the trials, which a second
        call on the same machine does not repeat. None: nothing is kept.
      verbose: 1: a line on each trial and the minutes left, on standard error; 0: none.

    Returns:
      A `BatchSizes`; `print` shows its table.

    Raises:
      DataError: If the preset is missing or malformed.
      RunError: If not even the smallest fits, if a trial fails for another reason than
        memory, or if the folder cannot be written or holds anything but this search.
      ValueError: If a setting is invalid, or there is no such function.
    """
    workload = workloads.named(workload)
    bounds = {"effective_batch": effective_batch, "max_batch_size": max_batch_size}
    with progress.Progress(verbose, at_most=True) as lines:
        tried = plan(workload, limit, modes=modes, steps=steps, **bounds)
        memory, words = process_memory.limits(limit)
        with training_steps.opened(workload, steps, workdir, lines, memory) as trials:
            sizes, figures = [], {}
            for mode in tried:
                size, figures = _search_mode(trials, mode, sizes, **bounds)
                sizes.append(size)
            batch_sizes = BatchSizes(
                name=trials.workload.name,
                unit=figures["unit"],
                limit=words,
                sizes=tuple(sizes),
                notes=_notes(trials, figures, bool(modes), effective_batch),
            )
            folder = trials.saved_trials.folder
            run_files.write_text(folder / "report.md", batch_sizes.to_markdown())
            run_files.write_json(folder / "batch_sizes.json", batch_sizes.to_dict())
    return batch_sizes


def _notes(trials, figures, modes_given, effective_batch):
    """Returns lines on the model, the mode, the rule of the search and the machine."""
    machine = trials.saved_trials.machine
    rule = (
        f"divisors of {effective_batch}, bisected"
        if effective_batch
        else f"multiples of {_MULTIPLE} (Tensor Cores), doubled, then bisected to "
        f"{_MULTIPLE} or {TOLERANCE:.0%}"
    )
    chosen = "" if modes_given else training_steps.mixed_mode(trials.workload)[1]
    return (
        figures["description"],
        *filter(None, [chosen]),
        f"a batch fits if a separate process takes {trials.steps} training steps "
        f"of `fit` within the limit; {rule}; a run also holds its data set, so leave a "
        "margin",
        f"{machine.device}; TensorFlow {machine.facts['tensorflow']}",
    )


def plan(
    workload: config_dict.ConfigDict,
    limit: str | int | None = None,
    *,
    modes: Sequence[str] | None = None,
    effective_batch: int | None = None,
    max_batch_size: int = MAX_BATCH_SIZE,
    steps: int = STEPS,
) -> tuple[str, ...]:
    """Returns the modes that are searched; the arguments are of `find_batch_size`.

    Raises:
      DataError: If the preset is missing or malformed.
      ValueError: If a setting is invalid.
    """
    checks.check_count("max_batch_size", max_batch_size, smallest=_MULTIPLE)
    checks.check_count("steps", steps)
    if effective_batch is not None:
        checks.check_count("effective_batch", effective_batch)
    if modes is not None:
        precision_modes.check_several(modes)
    process_memory.limits(limit)
    tried = tuple(modes or ("float32", training_steps.mixed_mode(workload)[0]))
    training_steps.check(workload, tried)
    return tried


def search(
    fits: Callable[[int], bool], sizes: Sequence[int], start: int, tolerance: float
) -> tuple[int, int | None]:
    """Searches for the largest batch size that fits: doubles its place, then bisects.

    Args:
      fits: Function of a batch size; returns whether it fits. That of a larger one
        implies a smaller one's.
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


def most_trials(count: int, start: int) -> int:
    """Returns how many trials a search takes at most.

    Args:
      count: How many sizes there are.
      start: As of `search`.
    """
    place = min(start, count - 1)
    # Nothing but the largest fails, which leaves the most to bisect; or the first does.
    doubled = ((count - 1) // (place + 1)).bit_length()
    bisected = min(((count - 1) // 2).bit_length(), _BISECTED)
    return 1 + max(doubled + bisected, place.bit_length())


def _search_mode(trials, mode, rows, effective_batch, max_batch_size):
    """Searches for one mode; the size that another mode was found is a good start.

    Returns:
      (an item of `BatchSizes.sizes`, the figures of its trial).
    """
    optimizer = trials.workload.get("optimizer")
    own_accumulation = optimizer.accumulation_steps if optimizer else 1
    tried: dict[int, dict[str, Any]] = {}
    if effective_batch:
        sizes = [n for n in range(1, effective_batch + 1) if effective_batch % n == 0]
        way = len(sizes), 0.0
    else:
        sizes = range(_MULTIPLE, max_batch_size + 1, _MULTIPLE)
        start = max((each["batch_size"] for each in rows), default=_MULTIPLE)
        way = start // _MULTIPLE - 1, TOLERANCE
    # How many another mode will have is not known.
    trials.lines.number, trials.lines.total = 0, most_trials(len(sizes), way[0])

    def accumulation(size):
        return effective_batch // size if effective_batch else own_accumulation

    def fits(size):
        label = f"{mode}, batch {size}"
        tried[size] = trials.take({"mode": mode}, size, accumulation(size), label)
        return not tried[size]["reason"]

    largest, failing = search(fits, sizes, *way)
    if not largest:
        raise errors.RunError(
            f"Even the smallest batch size tried, {failing}, does not fit in {mode}. "
            f"Received: {tried[failing]['reason']}. Expected more memory or a smaller "
            "model."
        )
    base = next((each for each in rows if each["mode"] == "float32"), None)
    comparable = base and base["failing"] and failing
    size = {
        "mode": mode,
        "batch_size": largest,
        "accumulation_steps": accumulation(largest),
        "failing": failing,
        "ratio": largest / base["batch_size"] if comparable else None,
        "peak_bytes": tried[largest]["peak_bytes"],
        "trials": [
            {"batch_size": n, **{name: x[name] for name in ("peak_bytes", "reason")}}
            for n, x in tried.items()
        ],
    }
    return size, tried[largest]
