"""A trial of training steps: what a batch size, or a plan for memory, holds at most."""

import contextlib
import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
from ml_collections import config_dict

from tfamp import errors, progress
from tfamp.measuring import process_memory, processes, trials, workloads
from tfamp.precision import control
from tfamp.runs import base_config, compare, run_files, trainer

# What Tensor Cores work on: NVIDIA, Matrix Multiplication Background User's Guide.
MULTIPLE = 8


class Variant(NamedTuple):
    """How a workload is trained.

    Attributes:
      what: Its configuration as dicts, with all that follows; or a function's name.
      keywords: Of `enable`: "mode", and others.
      batch_size: Examples of a batch; the function is called with it.
      accumulation_steps: Batches of an update of the weights.
    """

    what: dict[str, Any] | str
    keywords: dict[str, Any]
    batch_size: int
    accumulation_steps: int

    @property
    def key(self) -> str:
        """The variant as the name of its trial's file."""
        more = {k: v for k, v in self.keywords.items() if k != "mode"}
        digest = hashlib.sha256(json.dumps(more, sort_keys=True).encode()).hexdigest()
        name = (
            f"train-{self.keywords['mode']}-batch{self.batch_size}"
            f"-accumulated{self.accumulation_steps}"
        )
        return f"{name}-{digest[:8]}" if more else name


def variant(workload, keywords: dict[str, Any], size: int, count: int = 1) -> Variant:
    """Returns a variant of a workload.

    Args:
      workload: As `identity` returns it.
      keywords, size, count: The variant's keywords, batch size and accumulation steps.
    """
    if "function" in workload:
        return Variant(workload.function, keywords, size, count)
    config = config_of(workload, keywords["mode"], size)
    config.precision.update(keywords)
    config.optimizer.accumulation_steps = count
    return Variant(config.to_dict(), keywords, size, count)


def config_of(config, mode: str, batch_size: int) -> config_dict.ConfigDict:
    """Returns a configuration in another mode and with another batch size."""
    one = compare.config_of(config, mode, config.seed)
    one.batch_size = batch_size
    return one


def identity(workload: config_dict.ConfigDict, steps: int) -> config_dict.ConfigDict:
    """Returns the configuration of a job's folder; it names what its trials share.

    Args:
      workload: The configuration of the model, or {"function": its name}.
      steps: Of a trial; other modes, limits and batches go on from there.
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
    with one.unlocked():  # Of `fit_memory` as well: the trials are the same.
        one.benchmark = {"job": "find_batch_size", "steps": steps}
    return one


def mixed_mode(workload: config_dict.ConfigDict) -> tuple[str, str]:
    """Returns the mode that is tried beside float32, and a note on the choice."""
    if "function" in workload:
        return compare.mixed_mode("auto")
    precision = base_config.settle_rewrite(workload).precision
    return compare.mixed_mode(precision.mode, precision.graph_rewrite)


def check(workload: config_dict.ConfigDict, modes: Sequence[str]) -> None:
    """Raises what is wrong with a configuration, in any of the modes."""
    if "function" not in workload:
        workloads.validate(workload)
        workloads.check(config_of(workload, mode, MULTIPLE) for mode in modes)


# ---- Trials ----


class StepTrials(NamedTuple):
    """Trials of one workload's training steps.

    Attributes:
      workload: As `identity` returns it.
      saved_trials: Those in its folder, from this run and those before.
      steps: Updates of the weights in a trial.
      memory: What they must fit into.
      lines: Says what each is, and what came of it.
    """

    workload: config_dict.ConfigDict
    saved_trials: trials.Trials
    steps: int
    memory: process_memory.Memory
    lines: progress.Progress

    def take(
        self,
        keywords: dict[str, Any],
        size: int,
        count: int,
        label: str,
        room: process_memory.Memory | None = None,
    ) -> dict[str, Any]:
        """Takes the steps in a fresh process, unless that was done before.

        Args:
          keywords, size, count: As of `variant`.
          label: What its line calls it.
          room: What the process may hold; None: `memory`.

        Returns:
          The figures of `train`, and "reason": why it does not fit into the memory, ""
          if it does. A process that ran out of memory, as its words in "lack" tell, has
          no other figures, and "peak_bytes" is None.

        Raises:
          RunError: If it fails for another reason.
        """
        trial, room = variant(self.workload, keywords, size, count), room or self.memory

        def work():
            done = processes.call(train, trial, self.steps, memory=room)
            if done.failure and not done.lack:
                return done
            conditions = {"lack": done.lack, "limits": list(room)}
            return processes.Outcome((done.value or {"peak_bytes": None}) | conditions)

        def usable(figures):
            # A lack of memory says nothing where there was less of it.
            pairs = zip(room, figures.get("limits", room), strict=True)
            more = any((now or math.inf) > (then or math.inf) for now, then in pairs)
            return not (figures["lack"] and more)

        outcome = self.saved_trials.take(
            trial.key, work, self.lines, label, usable=usable
        )
        if outcome.failure:
            raise errors.RunError(
                f"A trial failed for another reason than memory: {label}. Received: "
                f"{outcome.failure}"
            )
        figures, reason = outcome.value, self._reason(outcome.value)
        text = f"does not fit: {reason}"
        if not reason:
            text = f"fits: {process_memory.mib(figures['peak_bytes'])}"
        self.lines.result(text)
        return {**figures, "reason": reason}

    def _reason(self, figures):
        """Why figures do not fit into the memory; "" if they do."""
        if figures["lack"]:
            return figures["lack"]
        # There may have been more of it; and a peak can be too short to be seen.
        for kind, most in self.memory._asdict().items():
            if most and (held := figures[f"{kind}_bytes"] or 0) > most:
                return process_memory.over(held, most)
        return ""


@contextlib.contextmanager
def opened(
    workload: config_dict.ConfigDict,
    steps: int,
    workdir: str | os.PathLike | None,
    lines: progress.Progress,
    memory: process_memory.Memory = process_memory.NO_LIMIT,
) -> Iterator[StepTrials]:
    """Opens the folder of a workload's trials.

    Args:
      workload, steps: As of `identity`.
      workdir: The folder; None: nothing is kept.
      lines, memory: Of the `StepTrials`.
    """
    shared = identity(workload, steps)
    with run_files.benchmark_folder(shared, workdir) as folder:
        function = trials.fingerprint(shared.get("function", ""))
        saved = trials.Trials(folder, function=function)
        yield StepTrials(shared, saved, steps, memory, lines)


def scaling(model: keras.Model, steps: int) -> dict[str, Any]:
    """Returns "skipped_steps" and "loss_scale"; None without loss scaling.

    Args:
      model: A trained model.
      steps: How many it was trained for; Keras' own loss scaling counts none.
    """
    optimizer = model.optimizer
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return {"skipped_steps": None, "loss_scale": None}
    counted = getattr(optimizer, "skipped_steps", None)
    if counted is not None:
        skipped = int(counted)
    else:
        inner = optimizer.inner_optimizer
        window = inner.gradient_accumulation_steps
        skipped = None if window else steps - int(inner.iterations)
    return {"skipped_steps": skipped, "loss_scale": float(optimizer.dynamic_scale)}


def train(variant: Variant, steps: int) -> dict[str, Any]:
    """Takes training steps in this process.

    Args:
      variant: What is trained.
      steps: Updates of the weights.

    Returns:
      Its peaks in bytes ("peak_bytes" of the GPU, where there is one), what the first
      update held more than others ("workspaces_bytes"; of a GPU: what cuDNN's trials
      took), "seconds" of an update after the first, the unit and the model's
      description.

    Raises:
      TypeError: If the function returns anything but a compiled model and batches of
        that size.
    """
    with built(variant, steps) as workload:
        fit = {"steps_per_epoch": variant.accumulation_steps}
        seconds, peaks = [], []
        for _ in range(steps):
            begun = time.perf_counter()
            workload.model.fit(workload.batches, **fit, shuffle=False, verbose=0)
            seconds.append(time.perf_counter() - begun)
            peaks.append(process_memory.peak_device(again=True) or 0)
    host, device = process_memory.peak_host(), max(peaks) or None
    return {
        "host_bytes": host,
        "device_bytes": device,
        "peak_bytes": host if device is None else device,
        "workspaces_bytes": max(peaks) - max(peaks[1:] or peaks),
        "seconds": statistics.median(seconds[1:] or seconds),
        "unit": workload.unit,
        "description": f"{workload.description}; "
        f"{workload.model.count_params():,} parameters",
    }


@contextlib.contextmanager
def built(variant: Variant, steps: int) -> Iterator[workloads.Workload]:
    """Scopes the precision of a trial, and yields its model and batches.

    Args:
      variant: What is trained.
      steps: Updates of the weights that there will be.
    """
    if not isinstance(variant.what, str):
        config = config_dict.ConfigDict(variant.what)
        with trainer.enabled(config.precision):
            yield workloads.from_config(config, steps)
        return
    with control.enabled(**variant.keywords):
        size, count = variant[2:]
        workload = workloads.from_function(variant.what, {"batch_size": size}, "auto")
        if workload.examples != size:
            raise TypeError(
                f"{variant.what} must return batches of the requested size. "
                f"Received: {workload.examples} examples for batch_size={size}."
            )
        if count > 1:
            optimizer = workload.model.optimizer
            optimizer = getattr(optimizer, "inner_optimizer", optimizer)
            optimizer.gradient_accumulation_steps = count
        yield workload
