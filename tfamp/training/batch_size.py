"""Finds the largest batch size of each precision mode that fits into memory.

Each trial is a separate process that takes training steps: it may run out of memory,
be ended by Linux or crash, and nothing of that reaches the process that asks.
"""

import json
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from absl import flags, logging
from ml_collections import config_dict

from tfamp import checks, functions, tables
from tfamp.diagnostics import doctor
from tfamp.training import (
    base_config,
    batch_trials,
    compare,
    measured_files,
    processes,
    run_files,
    synthetic,
)

SCHEMA_VERSION = 3
_TINY = 16  # Largest batch of a run of seconds.
# What goes with --find_batch_size.
FLAGS = ("memory_limit_mb", "max_batch_size", "effective_batch")


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
    max_batch_size: int = batch_trials.Settings._field_defaults["max_batch_size"],
    steps: int = batch_trials.Settings._field_defaults["steps"],
    workdir: str | os.PathLike | None = None,
    report: Callable[[str], object] = logging.info,
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
      report: Function called with a line on each trial.

    Returns:
      A `BatchSizes`; `print` shows its table.

    Raises:
      DataError: If the preset is missing or malformed.
      RunError: If not even the smallest fits, if a trial fails for another reason than
        memory, or if the folder cannot be written or holds anything but this search.
      ValueError: If a setting is invalid, or there is no such function.
    """
    asked = batch_trials.Settings(
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
        made = batch_trials.Search(
            shared, asked, memory, folder / "cells", held, report
        )
        for mode in modes:
            made.search(mode)
        rule = (
            f"divisors of {effective_batch}, bisected"
            if effective_batch
            else "multiples of 8 (Tensor Cores), doubled, then bisected to 8 or "
            f"{batch_trials.TOLERANCE:.0%}"
        )
        notes = [
            made.figures["description"],
            "" if asked.modes else _mixed(shared)[1],
            f"a batch fits if a separate process takes {asked.steps} training steps of "
            f"`fit` within the limit; {rule}; a run also holds its data set, so leave "
            "a margin",
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


def identity(workload: config_dict.ConfigDict, asked: batch_trials.Settings):
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


def plan(
    workload: config_dict.ConfigDict, asked: batch_trials.Settings
) -> tuple[str, ...]:
    """Returns the modes that are searched.

    Args:
      workload: As for `identity`.
      asked: What to search for.

    Raises:
      DataError: If the preset is missing or malformed.
      ValueError: If a setting is invalid.
    """
    checks.check_count(
        "max_batch_size", asked.max_batch_size, smallest=batch_trials.MULTIPLE
    )
    checks.check_count("steps", asked.steps)
    if asked.effective_batch is not None:
        checks.check_count("effective_batch", asked.effective_batch)
    processes.limits(asked.limit)
    modes = asked.modes or ("float32", _mixed(workload)[0])
    if "function" not in workload:
        synthetic.validate(workload)
        synthetic.check(
            batch_trials.config_of(workload, mode, batch_trials.MULTIPLE)
            for mode in modes
        )
    return modes


def _mixed(workload):
    if "function" in workload:
        return compare.mixed_mode("auto")
    precision = base_config.settle_rewrite(workload).precision
    return compare.mixed_mode(precision.mode, precision.graph_rewrite)


# ---- The command line ----


def define() -> None:
    """Defines the flags."""
    flags.DEFINE_bool(
        "find_batch_size",
        False,
        "Find the largest batch size that fits into memory, in float32 and in the "
        "mixed mode, instead of running a job. Each trial is a separate process.",
    )
    flags.DEFINE_integer(
        "memory_limit_mb",
        None,
        "Memory limit in MiB: of the first GPU, or of the process without a GPU. "
        "Default: all GPU memory, or most of the available host memory.",
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "max_batch_size",
        batch_trials.Settings().max_batch_size,
        "Largest batch size to try.",
        lower_bound=batch_trials.MULTIPLE,
    )
    flags.DEFINE_integer(
        "effective_batch",
        None,
        "Examples per weight update: find the largest micro-batch that fits, and how "
        "many of them to accumulate.",
        lower_bound=1,
    )


def settings(tiny: bool = False) -> batch_trials.Settings:
    """Returns what the flags ask for.

    Args:
      tiny: Whether a run of seconds is wanted; a largest batch that was given counts.
    """
    limit, largest, whole = (flags.FLAGS[name] for name in FLAGS)
    small = tiny and not largest.present
    return batch_trials.Settings(
        limit=limit.value and limit.value * processes.MIB,
        effective_batch=whole.value,
        max_batch_size=_TINY if small else largest.value,
    )
