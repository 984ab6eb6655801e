"""Finds what makes a model's training fit into memory, at the least cost."""

import json
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from ml_collections import config_dict

from tfamp import checks, errors, progress, tables
from tfamp.facts import hardware
from tfamp.measuring import (
    memory_options,
    process_memory,
    processes,
    training_steps,
    workloads,
)


class MemoryPlan(NamedTuple):
    """What makes a training step fit, as plain data; `print` it.

    Attributes:
      name: Name of the configuration or function.
      limit: The memory that a step must fit into, as text.
      options: A dict for each option, in the order in which they were tried; one with
        a + has those before it that free enough: option (what is new); kept (whether
        the next ones have it, too); keywords (of `enable`);
        batch_size (of one part); accumulation_steps (parts of one update of the
        weights); predicted_bytes; measured_bytes and time_ratio (over float32's), None
        where no step was taken; workspaces_bytes (what of the measured only the first
        step held, on a GPU); exceeded, whether a trial was ended by the limit.
      chosen: The option that fits; None if none does.
      notes: Lines on the machine, and on what is short.
    """

    name: str
    limit: str
    options: tuple[dict[str, Any], ...]
    chosen: dict[str, Any] | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return {"schema_version": 1, **self._asdict()}

    def to_text(self) -> str:
        """Returns the table, the choice and the notes."""
        rows = []
        for each in self.options:
            measured, ratio = each["measured_bytes"], each["time_ratio"]
            none = "over the limit" if each["exceeded"] else "-"
            left_out = not each.get("kept", True) and each is not self.options[-1]
            rows.append(
                {
                    "option": each["option"] + " (frees < 1 %: not below)" * left_out,
                    "predicted": process_memory.mib(each["predicted_bytes"]),
                    "measured": process_memory.mib(measured) if measured else none,
                    "time over float32": f"{ratio:.2f}" if ratio else "-",
                    "chosen": "yes" if each is self.chosen else "",
                }
            )
        return "\n".join(
            [tables.of_dicts(rows), "", *(f"- {x}" for x in self._lines())]
        )

    __str__ = to_text

    def _lines(self):
        modes = (x["keywords"]["mode"] for x in self.options if x["option"][0] == "+")
        if mode := next(modes, ""):
            yield f"rows with +: in {mode}, each together with those above it"
        yield f"limit: {self.limit}"
        if self.chosen is not None:
            _, size, parts = memory_options.arguments(self.chosen)
            texts = [
                f"{key}={json.dumps(value)}".removeprefix("mode=")
                for key, value in self.chosen["keywords"].items()
            ]
            more = f", gradient_accumulation_steps={parts}" if parts > 1 else ""
            yield f"`tfamp.enable({', '.join(texts)})  # Batches of {size}{more}`"
        yield from self.notes


def fit_memory(
    workload: str | Callable[..., Any] | config_dict.ConfigDict,
    limit: str | int | None = None,
    *,
    batch_size: int | None = None,
    steps: int = 3,
    workdir: str | os.PathLike | None = None,
    verbose: int = 1,
) -> MemoryPlan:
    """Finds the cheapest settings with which a training step fits into memory.

    These measures are added in order until a step fits: the 16-bit mode for this
    hardware (with attention in linear memory), recomputing half of the blocks in the
    backward pass, recomputing all of them, optimizer slots in bfloat16, slots in 8
    bits, gradient accumulation over parts of the batch, and weights in bfloat16. One
    that frees less than 1 % of what float32 holds is left out of the next plans, and
    one that the optimizer refuses is not tried. If nothing fits, accumulation alone is
    tried in both modes, since other measures bring programs of their own.

    `tfamp.memory` predicts the memory of each. Both modes, and plans that are predicted
    to fit, are measured in separate processes; a plan's ends if it exceeds the limit.
    cuDNN's workspaces are no part of a prediction: TensorFlow leaves out what does not
    fit. Those of the first step of a measured mode are in the notes.

    Args:
      workload: As in `find_batch_size`: a function with an argument `batch_size` that
        returns a compiled model and a dataset of batches, or its name; or a
        configuration.
      limit: As in `find_batch_size`: "2GiB" or a number of bytes, programs included.
      batch_size: Examples of an update of the weights; None: the configuration's.
      steps: Updates that are measured.
      workdir: Folder for the trials, which a second call on the same machine with as
        many steps does not repeat. None: nothing is kept.
      verbose: 1: a line on each trial and the minutes left, on standard error; 0: none.

    Returns:
      A `MemoryPlan`; `print` shows its table, and keywords of `enable` to paste.

    Raises:
      RunError: If a trial fails for another reason than memory, or if the folder cannot
        be written or holds anything but such trials of this workload.
      ValueError: If a setting is invalid, or there is no such function.

    Example:
      print(tfamp.fit_memory("my_script:build", limit="2GiB", batch_size=64))
    """
    workload = workloads.named(workload)
    size = workloads.batch_size_of(workload, batch_size)
    checks.check_count("steps", steps)
    memory, words = process_memory.limits(limit)
    mixed, _ = training_steps.mixed_mode(workload)
    with progress.Progress(verbose, at_most=True) as lines:
        training_steps.check(workload, ("float32", mixed))
        with training_steps.opened(workload, steps, workdir, lines, memory) as trials:
            plans = _Plans(trials, size, mixed)
            plans.make()
    name, options = trials.workload.name, tuple(plans.options)
    return MemoryPlan(name, words, options, plans.chosen, tuple(plans.notes()))


class _Plans:
    """The options of one call, and the first that fits.

    Attributes:
      options: Those of `MemoryPlan`.
      chosen: The one that fits; None if none does.
    """

    def __init__(self, trials, size, mixed):
        self.trials, self.size, self.mixed = trials, size, mixed
        self.free, _ = process_memory.limits(None)
        gpu = any(device.kind == "GPU" for device in hardware.read_devices())
        host, device = self.trials.memory
        self.most = (device or math.inf) if gpu else host
        self.options, self.chosen = [], None
        self.overheads: dict[str, float] = {}  # Mode -> what a step in it held besides.
        self.seconds: dict[str, float] = {}

    def make(self):
        """Measures both modes, then what is predicted to fit, until one does."""
        modes = [
            memory_options.make(mode, {"mode": mode}, self.size)
            for mode in ("float32", self.mixed)
        ]
        self.chosen = next((x for x in modes if self._fits(x, self.free)), None)
        options = self._predict(
            memory_options.predict,
            *(self.size, self.mixed, modes[0]["measured_bytes"]),
        )
        self.overheads = _overheads(modes, options)
        self.options = [*modes, *options[2:]]
        self._choose(options[2:])
        if self.chosen is None and min(self.overheads.values()) < self.most:
            tried = [memory_options.arguments(each) for each in self.options]
            every = self._predict(memory_options.predict_parts, self.size, self.mixed)
            parts = [x for x in every if memory_options.arguments(x) not in tried]
            self.options += parts
            self._choose(parts)
        for each in self.options:
            if {"float32", each["option"]} <= self.seconds.keys():
                own = self.seconds[each["option"]]
                each["time_ratio"] = own / self.seconds["float32"]

    def _choose(self, options):
        for each in options:
            each["predicted_bytes"] += self.overheads[each["keywords"]["mode"]]
        likely = [each for each in options if each["predicted_bytes"] <= self.most]
        self.trials.lines.total = self.trials.lines.number + len(likely)
        self.chosen = self.chosen or next(filter(self._fits, likely), None)

    def _fits(self, option, room=None):
        label = option["option"]
        if room is not None:  # Of a mode alone.
            label = f"a training step in {label}"
        figures = self.trials.take(
            *memory_options.arguments(option), label=label, room=room
        )
        if figures["lack"]:
            option["exceeded"] = True
        else:
            option["measured_bytes"] = figures["peak_bytes"]
            option["workspaces_bytes"] = figures.get("workspaces_bytes", 0)
            self.seconds[option["option"]] = figures["seconds"]
        return not figures["reason"]

    def _predict(self, function, *arguments):
        workload, saved_trials, *_, lines = self.trials

        def work():
            done = processes.call(function, workload, *arguments)
            return done._replace(value={"options": done.value})

        name = f"{function.__name__}-batch{self.size}"
        label = "what the options hold, by tfamp.memory"
        outcome = saved_trials.take(name, work, lines, label, given=list(arguments))
        if outcome.failure:
            raise errors.RunError(f"A prediction failed. Received: {outcome.failure}")
        return outcome.value["options"]

    def notes(self):
        """Lines on the figures, and on what is short."""
        more = ", plus what else a measured step in that mode held"
        yield "predicted: by `tfamp.memory`" + more * any(self.overheads.values())
        for each in self.options:
            if size := each["workspaces_bytes"]:
                yield (
                    f"{each['option']}: {process_memory.mib(size)} of the measured "
                    "only in the first step, in which cuDNN tries algorithms (as far "
                    "as they fit)"
                )
        if self.chosen is None:
            yield f"nothing fits: {_short(self.options, self.most)}"


def _overheads(modes, predicted):
    """Returns what a step in each mode held besides: programs, and libraries' own.

    Predicts the modes, too. One that was not measured is taken to hold what the one
    before it does.
    """
    overheads, extra = {}, 0
    for each, prediction in zip(modes, predicted, strict=False):
        if held := each["measured_bytes"]:
            extra = held - each["workspaces_bytes"] - prediction["predicted_bytes"]
        each["predicted_bytes"] = prediction["predicted_bytes"] + extra
        overheads[each["option"]] = extra
    return overheads


def _short(options, most):
    """Returns what is short with the option that holds least, as text."""
    least = min(options, key=_held)
    verb = "holds" if least["measured_bytes"] else "is predicted to hold"
    text = f"{least['option']!r} {verb} {process_memory.mib(_held(least))}"
    if _held(least) > most:
        return f"{text}, {process_memory.mib(_held(least) - most)} more than available"
    return f"{text}, and exceeded the limit when it was tried"


def _held(option):
    return option["measured_bytes"] or option["predicted_bytes"]
