"""Runs the plan for a GPU: the parts in order, each figure in a file when it is known.

What is timed has the device for itself: its processes are prepared side by side, since
that is the work of CPU cores, and measure in turns. The rest runs side by side, as far
as the machine has room. A process that hangs or dies ends alone. The next call, on
another day, measures what is missing; each device has a folder of its own.
"""

import concurrent.futures
import contextlib
import datetime
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from tfamp.facts import hardware, names
from tfamp.measuring import cells, processes, runner, trials
from tfamp.measuring.device import page, parts
from tfamp.measuring.device.parts import Asked, Group, Job, Variant

# Of the seconds left to a group: a variant that needs more is left out.
_PREPARES = 0.6
_LEAST = 15  # Seconds; with less left nothing is begun.
_SILENCE = 15  # Seconds, until a line says what is running.
_HELD = 6 * 2**30  # Bytes of a GPU that a process may hold beside others.


def run(
    folder: pathlib.Path,
    asked_parts: tuple[str, ...],
    minutes: float,
    tiny: bool,
    torch_python: str,
    command: str,
    say: Callable[[str], object],
) -> pathlib.Path:
    """Measures what is missing, and writes the page.

    Args:
      folder: Each device has a folder in it.
      asked_parts, minutes, tiny, torch_python: As of `Asked`.
      command: That of the user, for the page.
      say: Function called with a line on each process.

    Returns:
      The device's folder, with `report.md`, `report.json` and `steps.png`.

    Raises:
      ValueError: If there is no such part.
    """
    if unknown := set(asked_parts) - set(parts.PARTS):
        raise ValueError(
            f"Unknown parts. Received: {', '.join(sorted(unknown))}. Expected some of "
            f"{', '.join(parts.PARTS)}."
        )
    known = cells.default_modes(slow=True)
    plain = "tf32" if "tf32" in known else "float32"
    mixed = [mode for mode in cells.default_modes() if mode.startswith("mixed")]
    asked = Asked(
        tuple(asked_parts) or tuple(parts.PARTS),
        minutes,
        tiny,
        torch_python,
        (plain, *mixed),
        processes.call(_device_memory, timeout=120).value,
    )
    label = hardware.device_label(hardware.read_devices())
    name = re.sub(r"\W+", "-", f"{label} tiny" if tiny else label).strip("-").lower()
    made = _Plan(folder / name, asked, say)
    made.run()
    page.write(made.folder, made.kept.machine, asked, made.took, made.failures, command)
    return made.folder


def _device_memory():
    """Bytes of the first GPU, which only a process that takes the GPU can ask for."""
    devices = names.resolve("tensorflow.python.client.device_lib:list_local_devices")
    found = devices() if devices else ()
    limits = (each.memory_limit for each in found if each.device_type == "GPU")
    return next(limits, None)


class _Plan:
    """One call; see `run`."""

    def __init__(self, folder, asked: Asked, say):
        self.folder, self.asked, self._print = folder, asked, say
        (folder / "cells").mkdir(parents=True, exist_ok=True)
        self.kept = trials.Trials(folder)
        today = datetime.date.today().isoformat()
        self._stamp = {"date": today, "commit": runner.commit()}
        self.end = time.monotonic() + 60 * asked.minutes
        self.failures: dict[str, str] = {}
        self.took: dict[str, float] = {}
        self._running: dict[str, float] = {}
        self._said = time.monotonic()

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()

    def run(self):
        """Measures the parts in order."""
        ended = threading.Event()
        speaker = threading.Thread(target=self._speak, args=(ended,), daemon=True)
        speaker.start()
        waiting: list[Job] = []
        for part in (*filter(self.asked.parts.__contains__, parts.PARTS), ""):
            every = [*parts.PARTS[part](self.asked)] if part else [None]
            if isinstance(every[0] if every else None, Job):
                waiting += every
                continue
            # Before a group, and at the end, what may run side by side has to be done.
            with concurrent.futures.ThreadPoolExecutor(self._room()) as pool:
                list(pool.map(self._beside, waiting))
            waiting = []
            for group in filter(None, every):
                self._timed(group)
        ended.set()
        speaker.join()

    def keep(self, name, figures):
        """Writes figures, with the day and the commit that they are of."""
        self.kept.write(name, figures | self._stamp)

    def say(self, line):
        """Prints a line, and when it was."""
        self._said = time.monotonic()
        self._print(f"[{max(0, self.left) / 60:4.1f} min left] {line}")

    def _speak(self, ended):
        while not ended.wait(1):
            if time.monotonic() - self._said >= _SILENCE and self._running:
                labels, since = zip(*list(self._running.items()), strict=True)
                spent = time.monotonic() - min(since)
                self.say(f"{spent:.0f} s: {', '.join(labels)}"[:200])

    @contextlib.contextmanager
    def _runs(self, label):
        self._running[label] = time.monotonic()
        self.say(label)
        try:
            yield
        finally:
            self.took[label] = time.monotonic() - self._running.pop(label)

    def _fails(self, label, why):
        self.failures[label] = why
        self.say(f"  {label}: {why[:300]}")

    def _room(self):
        """How many processes have room beside each other."""
        cores = len(os.sched_getaffinity(0)) * 3 // 4
        memory = self.asked.memory
        return max(1, min(cores, memory // _HELD) if memory else cores)

    # ---- What is timed ----

    def _timed(self, group: Group):
        """Times what is missing of a group, and its base with it."""
        missing = [each for each in group.variants if not self._whole(group, each)]
        if not missing:
            return
        chosen = dict.fromkeys((group.variants[0], *missing))
        label = f"{group.part}: {group.model}, {group.name}"
        if self.left < _LEAST:
            return self._fails(label, "no time left")
        base: list[Any] = []
        # A small GPU has no room for several of them: each has the limit of its own.
        sets = [[each] for each in chosen] if self.asked.small else [[*chosen]]
        with self._runs(label):
            for some in sets:
                end = time.monotonic() + min(group.limit, self.left)
                self._in_turns(group, some, end, base)

    def _in_turns(self, group, variants, end, base):
        with contextlib.ExitStack() as scope:
            running = {
                each: scope.enter_context(parts.start(group, each, self.asked))
                for each in variants
            }
            for number in range(max(len(each.compiled) for each in variants)):
                stage = {
                    each: process
                    for each, process in running.items()
                    if len(each.compiled) > number
                }
                if number:
                    for process in stage.values():
                        process.proceed()
                turns = _Turns(self, group, number, stage, end, base)
                turns.take()
                running = {k: p for k, p in running.items() if k in turns.figures}

    def _whole(self, group, variant):
        found = [
            self.kept.read(figure_name(group, variant, compiled))
            for compiled in variant.compiled
        ]
        return all(each and len(each["seconds"]) == parts.ROUNDS for each in found)

    # ---- What runs beside others ----

    def _beside(self, job: Job):
        name, label = f"{job.part}-{job.name}", f"{job.part}: {job.name}"
        if self.kept.read(f"{name}-done") is not None:
            return
        if self.left < _LEAST:
            return self._fails(label, "no time left")
        end = time.monotonic() + min(job.limit, self.left)
        with self._runs(label), job.start() as process:
            for number in range(10**6):
                outcome = process.result(end - time.monotonic())
                if outcome.failure:
                    return self._fails(label, outcome.lack or outcome.failure)
                if outcome.value is None:  # The end of a generator.
                    break
                self.keep(f"{name}-{number:03d}", outcome.value)
                process.proceed()
            self.keep(f"{name}-done", {})


class _Turns:
    """One variant of each process: prepared, timed in turns, and profiled."""

    def __init__(self, plan, group, number, stage, end, base):
        self.plan, self.group, self.number, self.stage = plan, group, number, stage
        self.end, self.base = end, base
        self.figures: dict[Variant, dict[str, Any]] = {}

    def take(self):
        """Takes all figures, each of which is in a file then."""
        left = self.end - time.monotonic()
        ready = time.monotonic() + _PREPARES * left
        for each in self.stage:
            self._next(each, ready)
            if each in self.figures:
                first = self.figures[each]["first_step_seconds"]
                self.plan.say(f"  {self._label(each)}: first step {first:.1f} s")
        for _ in range(parts.ROUNDS):
            for each in [*self.figures]:
                self.stage[each].proceed()
                self._next(each, self.end)
        for each in [*self.figures]:
            if each.side != "torch":
                self.stage[each].proceed()
                self._next(each, self.end)

    def _next(self, variant, end):
        outcome = self.stage[variant].result(end - time.monotonic())
        if outcome.failure or outcome.value is None:
            self.figures.pop(variant, None)
            self.stage[variant].__exit__()
            self.plan._fails(self._label(variant), outcome.lack or outcome.failure)
            return
        held = self.figures.setdefault(variant, {"seconds": []})
        found = dict(outcome.value)
        if "seconds" in found:
            held["seconds"].append(found.pop("seconds"))
            if variant == self.group.variants[0] and not self.number:
                self.base.append(held["seconds"][-1])
        compiled = variant.compiled[self.number]
        held |= found | {"base_seconds": self.base}
        self.plan.keep(figure_name(self.group, variant, compiled), held)

    def _label(self, variant):
        compiled = ", compiled" * variant.compiled[self.number]
        return f"{self.group.model}, {variant.side} {variant.mode}{compiled}"


def figure_name(group: Group, variant: Variant, compiled: bool) -> str:
    """Returns the name of a variant's file.

    Args:
      group, variant, compiled: What it is of.
    """
    words = group.part, group.model, group.name, variant.side, variant.mode
    return "-".join([*words, "compiled" if compiled else "plain"])
