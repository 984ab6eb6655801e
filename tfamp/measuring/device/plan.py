"""Runs the plan for a GPU: the parts in order, each figure in a file when it is known.

What is timed has the device for itself: its processes are prepared side by side, since
that is the work of CPU cores, and measure in turns. The rest runs side by side, as far
as the machine has room, while processes of the next group are prepared. A process that
hangs or dies ends alone. The next call, on another day, measures what is missing; each
device has a folder of its own.
"""

import concurrent.futures
import contextlib
import datetime
import itertools
import pathlib
import re
import shlex
import shutil
import time
from collections.abc import Callable
from typing import Any

from tfamp import progress
from tfamp.facts import hardware, names
from tfamp.measuring import processes, trials
from tfamp.measuring.benchmark import cell_modes, runner
from tfamp.measuring.device import page, parts
from tfamp.measuring.device.parts import Asked, Group, Job, Variant

# Of the seconds left to a group: a variant that needs more is left out.
_PREPARES = 0.6
_LEAST = 15  # Seconds; with less left nothing is begun.
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
      ValueError: If there is no such Python.
    """
    words = shlex.split(torch_python)
    if words and not shutil.which(words[0]):
        raise ValueError(
            f"No such command. Received: torch_python={torch_python!r}. Expected that "
            "of a Python with PyTorch."
        )
    plain = "tf32" if "tf32" in cell_modes.default_modes(slow=True) else "float32"
    mixed = [mode for mode in cell_modes.default_modes() if mode.startswith("mixed")]
    options = Asked(
        tuple(asked_parts) or tuple(parts.PARTS),
        minutes,
        tiny,
        torch_python,
        (plain, *mixed),
        processes.call(_device_memory, timeout=120).value,
    )
    label = hardware.device_label(hardware.read_devices())
    name = re.sub(r"\W+", "-", f"{label} tiny" if tiny else label).strip("-").lower()
    with progress.Progress(what="measuring", seconds=60 * minutes, say=say) as lines:
        plan = _Plan(folder / name, options, command, lines)
        try:
            plan.run()
        finally:
            plan.write()
            lines.say(f"open {plan.folder / 'report.md'}")
    return plan.folder


def _device_memory():
    """Bytes of the first GPU, which only a process that takes the GPU can ask for."""
    list_devices = names.resolve(
        "tensorflow.python.client.device_lib:list_local_devices"
    )
    devices = list_devices() if list_devices else ()
    limits = (each.memory_limit for each in devices if each.device_type == "GPU")
    return next(limits, None)


class _Plan:
    """One call; see `run`."""

    def __init__(self, folder, options: Asked, command, lines):
        self.folder, self.options, self.command = folder, options, command
        (folder / "cells").mkdir(parents=True, exist_ok=True)
        self.trials, self.lines = trials.Trials(folder), lines
        self._stamp = {
            "date": datetime.date.today().isoformat(),
            "commit": runner.commit(),
        }
        self.end = time.monotonic() + 60 * options.minutes
        self.failures: dict[str, str] = {}
        self.took: dict[str, float] = {}
        self._alive: set[Any] = set()

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()

    def run(self):
        """Measures the parts in order; the page is written after each of them."""
        jobs: list[Job] = []
        for part in filter(self.options.parts.__contains__, parts.PARTS):
            for each in parts.PARTS[part](self.options):
                if isinstance(each, Job):
                    jobs.append(each)
                else:
                    self._timed(each, jobs)
                    jobs = []
                    self.write()
        self._side_by_side(jobs)

    def write(self):
        """Writes the page of what there is."""
        page.write(self.trials, self.options, self.took, self.failures, self.command)

    def keep(self, name, figures):
        """Writes figures, with the day and the commit that they are of."""
        self.trials.write(name, figures | self._stamp)

    @contextlib.contextmanager
    def _runs(self, label):
        begun = time.monotonic()
        try:
            with self.lines.part(label):
                yield
        finally:
            self.took[label] = time.monotonic() - begun

    def _fails(self, label, why):
        self.failures[label] = why
        self.lines.say(f"  {label}: {page.shortened(why)}")

    def _side_by_side(self, jobs, held=0):
        """Runs jobs, as many beside each other as there is room for.

        Beside processes that hold so many bytes of the GPU.
        """
        cores, memory = processes.cores() * 3 // 4, self.options.memory
        room = max(1, min(cores, (memory - held) // _HELD) if memory else cores)
        with concurrent.futures.ThreadPoolExecutor(room) as pool:
            try:
                list(pool.map(self._beside, jobs))
            except BaseException:
                for process in [*self._alive]:
                    process.stop()
                raise

    # ---- What is timed ----

    def _timed(self, group: Group, jobs: list[Job]):
        """Runs the jobs; then times what is missing of a group, and its base."""
        base = group.variants[0]
        missing = [
            variant
            for variant in group.variants
            if _rounds(self.read(group, variant)) < parts.ROUNDS
        ]
        label = f"{group.part}: {group.model}, {group.name}"
        if not missing or self.left < _LEAST:
            self._side_by_side(jobs)
            if missing:
                self._fails(label, "no time left")
            return
        others = [each for each in missing if each != base]
        # A GPU has room for so many: each set has its base, and its limit. Where there
        # is room for one, it comes first and is that of all.
        count = self.options.together or 1 + len(others)
        step = max(1, count - 1)
        sets = [others[i : i + step] for i in range(0, len(others), step)]
        if count > 1 and sets:
            sets = [[base, *some] for some in sets]
        else:
            sets = [[base], *sets]
        seconds: list[Any] = []
        with self._runs(label):
            for some in sets:
                seconds = [] if base in some else seconds
                self._in_turns(group, some, jobs, seconds)
                jobs = []

    def read(self, group, variant):
        """Returns the figures of a variant, of the same sizes; None without."""
        figures = self.trials.read(figure_name(group, variant))
        same = figures and figures["sizes"] == self.options.sizes._asdict()
        return figures if same else None

    def _in_turns(self, group, variants, jobs, base):
        with contextlib.ExitStack() as scope:
            running = {
                each: scope.enter_context(parts.start(group, each, self.options))
                for each in variants
            }
            self._side_by_side(jobs, len(variants) * parts.HELD)
            end = time.monotonic() + min(group.limit, self.left)
            _Turns(self, group, running, end, base).take()

    # ---- What runs beside others ----

    def _beside(self, job: Job):
        name, label = f"{job.part}-{job.name}", f"{job.part}: {job.name}"
        if self.trials.read(f"{name}-done") is not None:
            return
        if self.left < _LEAST:
            return self._fails(label, "no time left")
        end = time.monotonic() + min(job.limit, self.left)
        with self._runs(label), job.start() as process, contextlib.ExitStack() as scope:
            self._alive.add(process)
            scope.callback(self._alive.remove, process)
            for number in itertools.count():
                outcome = process.result(end - time.monotonic())
                if outcome.value is not None:
                    self.keep(f"{name}-{number:03d}", outcome.value)
                if outcome.failure:  # It is tried again by the next call.
                    return self._fails(label, outcome.lack or outcome.failure)
                if outcome.value is None:  # The end of a generator.
                    break
                process.proceed()
            self.keep(f"{name}-done", {})


class _Turns:
    """Processes that are prepared, timed in turns, and profiled."""

    def __init__(self, plan, group, running, end, base):
        self.plan, self.group, self.running = plan, group, running
        self.end, self.base, self.begun = end, base, time.monotonic()
        self.figures: dict[Variant, dict[str, Any]] = {}

    def take(self):
        """Takes all figures, each of which is in a file then."""
        ready = time.monotonic() + _PREPARES * (self.end - time.monotonic())
        for each in self.running:
            self._next(each, ready)
        for _ in range(parts.ROUNDS + 1):  # The last is a profile.
            for each in [*self.figures]:
                self.running[each].proceed()
                self._next(each, self.end)

    def _next(self, variant, end):
        outcome = self.running[variant].result(end - time.monotonic())
        if outcome.failure or outcome.value is None:
            self.figures.pop(variant, None)
            self.running[variant].__exit__()
            # The limit is that of all of them together.
            spent = f"not done after {time.monotonic() - self.begun:.0f} s"
            why = re.sub(r"^ended after \d+ s", spent, outcome.failure)
            self.plan._fails(self._label(variant), outcome.lack or why)
            return
        held = self.figures.setdefault(variant, {"seconds": []})
        figures = dict(outcome.value)
        if "seconds" in figures:
            held["seconds"].append(figures.pop("seconds"))
            if variant == self.group.variants[0]:
                self.base.append(held["seconds"][-1])
        sizes = self.plan.options.sizes._asdict()
        held |= figures | {"base_seconds": self.base, "sizes": sizes}
        # The base is measured again, beside others: never in place of more.
        if _rounds(held) >= _rounds(self.plan.read(self.group, variant)):
            self.plan.keep(figure_name(self.group, variant), held)

    def _label(self, variant):
        what = f"{variant.side} {variant.mode}{', compiled' * variant.compiled}"
        return f"{self.group.part}: {self.group.model}, {what}"


def _rounds(figures):
    return len(figures["seconds"]) if figures else -1


def figure_name(group: Group, variant: Variant) -> str:
    """Returns the name of a variant's file.

    Args:
      group, variant: What it is of.
    """
    words = group.part, group.model, group.name, variant.side, variant.mode
    return "-".join([*words, "compiled" if variant.compiled else "plain"])
