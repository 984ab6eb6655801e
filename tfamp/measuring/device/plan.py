"""The parts of the plan for a GPU, most wanted first, within minutes.

What is timed runs alone: its processes are prepared side by side and then measure in
turns. The rest runs side by side, as many as the machine has room for. Each figure is in
a file when it is known; a second call, on another day, measures what is missing.
"""

import concurrent.futures
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.facts import hardware
from tfamp.measuring import accuracy, cells, processes, trials, workloads
from tfamp.measuring.device import features, networks, numerics, peaks, steps
from tfamp.runs import base_config

PARTS = (
    *("time", "numerics", "memory", "tests", "accuracy"),
    *("float8", "rewrite", "fit_memory"),
)
ROUNDS, COUNT = 3, 10
_TORCH = pathlib.Path(__file__).with_name("torch_steps.py")
_CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
_PREPARES = 0.6  # Of the seconds that are left to a variant.
_HELD = 6 * 2**30  # Bytes of a GPU that a process may hold beside others.
_LEAST = 15  # Seconds; with less left nothing is begun.


class Asked(NamedTuple):
    """What a call is asked for.

    Attributes:
      parts: Of `PARTS`.
      minutes: Of all.
      tiny: Whether models are small, as a check.
      torch_python: Command of an interpreter with PyTorch; "": this one.
    """

    parts: tuple[str, ...] = PARTS
    minutes: float = 12.0
    tiny: bool = False
    torch_python: str = ""


class Job(NamedTuple):
    """What one process measures, beside others.

    Attributes:
      part, name: Of what.
      limit: Seconds.
      start: Function that starts it; the result has `result`, `proceed` and is a
        context.
      many: Whether it yields figures until it ends, each with a "name".
    """

    part: str
    name: str
    limit: float
    start: Callable[[], Any]
    many: bool = False


class Plan:
    """One call: it keeps figures, and says what comes of each process.

    Args:
      folder: For the figures; one for each device, beside each other.
      asked: What to measure.
      say: Function called with a line on each.
    """

    def __init__(self, folder: pathlib.Path, asked: Asked, say: Callable[[str], Any]):
        self.asked, self.say = asked, say
        label = hardware.device_label(hardware.read_devices())
        name = "".join(x if x.isalnum() else "-" for x in label).strip("-").lower()
        self.folder = folder / (f"{name}-tiny" if asked.tiny else name)
        (self.folder / "cells").mkdir(parents=True, exist_ok=True)
        self.kept = trials.Trials(self.folder)
        self.start = time.monotonic()
        self.failures: dict[str, str] = {}
        self.sizes = networks.TINY if asked.tiny else networks.Sizes()

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return 60 * self.asked.minutes - (time.monotonic() - self.start)

    def run(self) -> None:
        """Measures what is missing of the parts that were asked for."""
        if "time" in self.asked.parts:
            for group in self._groups():
                self._timed(*group)
        jobs = [
            job
            for part in PARTS[1:]
            if part in self.asked.parts
            for job in getattr(self, f"_{part}_jobs")()
            if self.kept.read(f"{part}-{job.name}-done") is None
        ]
        with concurrent.futures.ThreadPoolExecutor(_room()) as pool:
            list(pool.map(self._beside, jobs))

    # ---- What is timed ----

    def _groups(self) -> Iterator[tuple[str, list[Any], float]]:
        """Model, its variants (side, mode, choices of XLA), and seconds at most."""
        ours = "mixed_bfloat16", "tf32", "mixed_float16"
        for name in networks.NAMES:
            torch = [("torch", mode, (False, True)) for mode in ours[:2]]
            yield (
                name,
                [*(("tfamp", mode, (False, True)) for mode in ours), *torch],
                200,
            )
            stock = [("keras", mode, (False,)) for mode in ours]
            yield name, [("tfamp", ours[0], (False,)), *stock], 120
        # Keras' default on a GPU. By itself: it may compile for many minutes.
        yield "bert_base", [("keras", ours[0], (True,))], 150

    def _timed(self, name, variants, limit):
        """Prepares all variants at once, then times them in turns."""
        beside = ",".join(dict.fromkeys(side for side, *_ in variants))
        missing = [
            each
            for each in variants
            if any(
                self._time_of(name, beside, *each[:2], jit) is None for jit in each[2]
            )
        ]
        if not missing:
            return
        if self.left < _LEAST:
            return self._fail("time", f"{name} {beside}", "no time left")
        end = time.monotonic() + min(limit, self.left)
        self.say(f"time: {name}, {beside} ({self.left / 60:.1f} min left)")
        running = {}
        for side, mode, jits in variants:
            if side == "torch":
                running |= {
                    (side, mode, jit): _Torch(
                        self.asked.torch_python, name, self.sizes, mode, jit
                    )
                    for jit in jits
                }
            else:
                running[side, mode, None] = processes.Process(
                    *(steps.steps, name, side, mode, jits, self.sizes, ROUNDS, COUNT),
                    preload=(steps.__name__,),
                )
        try:
            for number in range(max(len(jits) for *_, jits in variants)):
                stage = {
                    (
                        *key[:2],
                        dict((x[:2], x[2]) for x in variants)[key[:2]][number]
                        if key[2] is None
                        else key[2],
                    ): process
                    for key, process in running.items()
                    if key[2] is None or number == 0
                }
                stage = {k: p for k, p in stage.items()}
                self._turns(name, beside, stage, end, number)
        finally:
            for process in running.values():
                process.__exit__()

    def _turns(self, name, beside, stage, end, number):
        """One variant of each process: prepared, then rounds in turns, then profiled."""
        figures: dict[Any, dict[str, Any]] = {}

        # Those that are not prepared by then are left out: the others are timed.
        ready = time.monotonic() + _PREPARES * (end - time.monotonic())

        def take(key, process, go):
            if go:
                process.proceed()
            outcome = process.result((end if go else ready) - time.monotonic())
            label = f"{name}, {' '.join(key[:2])}{', XLA or compiled' * key[2]}"
            if outcome.failure:
                figures.pop(key, None)
                self._fail("time", label, outcome.failure)
                process.__exit__()
                return
            found = dict(outcome.value)
            held = figures.setdefault(key, {"seconds": []})
            held["seconds"].append(found.pop("seconds")) if "seconds" in found else None
            held |= found
            self.kept.write(self._time_name(name, beside, *key), held)

        if number:
            for process in stage.values():
                process.proceed()
        for key, process in stage.items():
            take(key, process, False)
            if key in figures:
                first = figures[key]["first_step_seconds"]
                self.say(
                    f"  {' '.join(key[:2])}, XLA {key[2]}: first step {first:.1f} s"
                )
        for _ in range(ROUNDS):
            for key in list(figures):
                take(key, stage[key], True)
        for key in list(figures):
            if key[0] != "torch":
                take(key, stage[key], True)

    def _time_name(self, name, beside, side, mode, jit):
        kind = "xla" if jit else "plain"
        return f"time-{name}-beside-{beside.replace(',', '-')}-{side}-{mode}-{kind}"

    def _time_of(self, name, beside, side, mode, jit):
        found = self.kept.read(self._time_name(name, beside, side, mode, jit))
        whole = found and len(found["seconds"]) == ROUNDS
        return found if whole and ("profile" in found or side == "torch") else None

    # ---- What runs beside others ----

    def _beside(self, job):
        label = f"{job.part}: {job.name}"
        if self.left < _LEAST:
            return self._fail(job.part, job.name, "no time left")
        self.say(f"{label} ({self.left / 60:.1f} min left)")
        begun, end = time.monotonic(), time.monotonic() + min(job.limit, self.left)
        number = 0
        with job.start() as process:
            while True:
                outcome = process.result(end - time.monotonic())
                if outcome.failure:
                    return self._fail(job.part, job.name, outcome.failure)
                if outcome.value is None:  # Of `many`: all is done.
                    break
                self.kept.write(f"{job.part}-{job.name}-{number}", outcome.value)
                number += 1
                if not job.many:
                    break
                process.proceed()
        seconds = time.monotonic() - begun
        self.kept.write(f"{job.part}-{job.name}-done", {"seconds": seconds})
        self.say(f"{label}: done in {seconds:.0f} s")

    def _fail(self, part, name, why):
        self.failures[f"{part}: {name}"] = why
        self.say(f"{part}: {name}: {why[:300]}")
        path = self.folder / "failures.json"
        path.write_text(json.dumps(self.failures, indent=1))

    def _numerics_jobs(self):
        yield _job(
            "numerics", "layers", 150, numerics.check, self.asked.tiny, many=True
        )

    def _memory_jobs(self):
        limit_of_0 = {"TF_CUDNN_WORKSPACE_LIMIT_IN_MB": "0"}
        no_tuning = {"TF_CUDNN_USE_AUTOTUNE": "0"}
        recipes = {
            "bert/docstrings": 64,
            "lm/docstrings": 64,
            "cnn/cifar10_resnet": 512,
            "cnn/digits": 512,
            "unet/digits_on_photographs": 64,
            "tabular/bike_sharing": 512,
        }
        for recipe, size in recipes.items():
            for mode in ("mixed_bfloat16", "tf32"):
                for jit in (False, True):
                    yield self._memory_job(recipe, size, mode, jit)
        for recipe in ("cnn/cifar10_resnet", "unet/digits_on_photographs"):
            for what, environment in (("limit 0", limit_of_0), ("untuned", no_tuning)):
                yield self._memory_job(
                    recipe, recipes[recipe], "tf32", False, what, environment
                )
        blocks = {"remat": ["transformer_layer_.*"]}
        for recipe, what, keywords in (
            ("bert/docstrings", "remat", blocks),
            ("lm/docstrings", "slots 8bit", {"optimizer_state": "8bit"}),
            ("lm/docstrings", "slots bfloat16", {"optimizer_state": "bfloat16"}),
        ):
            for jit in (False, True):
                yield self._memory_job(
                    recipe, 64, "mixed_bfloat16", jit, what, {}, keywords
                )

    def _memory_job(
        self, recipe, size, mode, jit, what="", environment=None, keywords=None
    ):
        config = workloads.load(_CONFIGS / f"{recipe}.py")
        if self.asked.tiny:
            config, size = base_config.apply_tiny(config), 8
        one = cells.with_mode(config, mode, 0)
        one.batch_size, one.jit_compile = size, jit
        one.precision.update(keywords or {})
        name = "-".join([recipe.replace("/", "."), mode, "xla" if jit else "plain"])
        name += f"-{what.replace(' ', '')}" if what else ""
        asked = one.to_dict(), environment or {}
        return _job("memory", name, 150, peaks.measure, *asked)

    def _tests_jobs(self):
        root = pathlib.Path(__file__).parents[3]
        if not (root / "tests").is_dir():
            return
        first = "tests/rules/test_codes.py tests/rules/test_update.py tests/contract/test_low_bit.py"
        more = "tests/contract/test_optimizer_properties.py tests/contract/test_attention.py tests/contract/test_remat.py"
        for name, files in {"first": first, "second": more}.items():
            command = [
                *(
                    sys.executable,
                    "-m",
                    "pytest",
                    "-q",
                    "-n",
                    "0",
                    "-p",
                    "no:benchmark",
                ),
                *(
                    "-p",
                    "no:cacheprovider",
                    "--tb=short",
                    "--maxfail=8",
                    *files.split(),
                ),
            ]
            if self.asked.tiny:
                command.append("--collect-only")
            log = self.folder / f"tests-{name}.txt"
            yield Job("tests", name, 240, lambda c=command, f=log: _Command(c, root, f))

    def _accuracy_jobs(self):
        recipes = (
            ("cnn/digits",)
            if not os.environ.get("TFAMP_SHARED_DATA")
            else ("cnn/digits", "bert/sentences")
        )
        for seed in range(1 if self.asked.tiny else 5):
            for recipe in recipes:
                for mode in ("tf32", "mixed_bfloat16", "mixed_float16"):
                    config = workloads.load(_CONFIGS / f"{recipe}.py")
                    if self.asked.tiny:
                        config = base_config.apply_tiny(config)
                    one = cells.with_mode(config, mode, seed)
                    if "sentences" in recipe:
                        one.data_dir = str(
                            pathlib.Path(
                                os.environ["TFAMP_SHARED_DATA"], "uci_sentences"
                            )
                        )
                    name = f"{recipe.replace('/', '.')}-{mode}-seed{seed}"
                    folder = str(self.folder / "runs" / name)
                    yield _job(
                        "accuracy", name, 240, accuracy.train, one.to_dict(), folder
                    )

    def _float8_jobs(self):
        yield _job(
            "float8", "dense", 120, features.train, "float8", {}, True, self.asked.tiny
        )
        yield _job(
            "float8",
            "dense-bfloat16",
            120,
            features.train,
            "mixed_bfloat16",
            {},
            True,
            self.asked.tiny,
        )

    def _rewrite_jobs(self):
        for mode in ("mixed_bfloat16", "mixed_float16"):
            asked = {"graph_rewrite": True}
            yield _job(
                "rewrite",
                mode,
                120,
                features.train,
                mode,
                asked,
                False,
                self.asked.tiny,
            )

    def _fit_memory_jobs(self):
        code = (
            "import tfamp, logging; from tfamp.measuring import workloads;"
            f"c = workloads.load({str(_CONFIGS / 'lm/docstrings.py')!r});"
            + (
                "from tfamp.runs import base_config; c = base_config.apply_tiny(c);"
                if self.asked.tiny
                else ""
            )
            + f"print(tfamp.fit_memory(c, {None if self.asked.tiny else '60MiB'!r}, batch_size={8 if self.asked.tiny else 64}))"
        )
        log = self.folder / "fit_memory.txt"
        root = pathlib.Path(__file__).parents[3]
        yield Job(
            "fit_memory",
            "lm",
            240,
            lambda: _Command([sys.executable, "-c", code], root, log),
        )


def _job(part, name, limit, function, *arguments, many=False):
    modules = steps.__name__, numerics.__name__, peaks.__name__, accuracy.__name__
    return Job(
        part,
        name,
        limit,
        lambda: processes.Process(
            function, *arguments, preload=(*modules, "keras_hub")
        ),
        many,
    )


def _room():
    """How many processes have room beside each other: cores, and memory of a GPU."""
    cores = len(os.sched_getaffinity(0)) * 3 // 4
    found = [d for d in hardware.read_devices() if d.kind == "GPU"]
    memory = getattr(found[0], "memory_bytes", None) if found else None
    return max(1, min(cores, memory // _HELD if memory else 8))


class _Command:
    """A command in a process of its own; its result is its exit code and last line."""

    def __init__(self, command, cwd, log):
        self._log, self._file = log, log.open("w")
        environment = os.environ | processes.one_gpu(os.environ)
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env=environment,
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._process.kill()
        self._process.wait()
        self._file.close()

    def result(self, timeout):
        try:
            code = self._process.wait(max(0, timeout))
        except subprocess.TimeoutExpired:
            return processes.Outcome(None, f"ended after {timeout:.0f} s")
        lines = self._log.read_text(errors="replace").strip().splitlines() or [""]
        return processes.Outcome(
            {"code": code, "last_line": lines[-1], "text": "\n".join(lines[-60:])}
        )


class _Torch:
    """The peer, which prints figures and goes on after a line."""

    def __init__(self, python, name, sizes, mode, compiled):
        self._words = tempfile.TemporaryFile("w+")
        command = [*(shlex.split(python) or [sys.executable]), str(_TORCH), name]
        command += [json.dumps(sizes._asdict()), str(ROUNDS), str(COUNT), mode]
        command.append("compiled" if compiled else "eager")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
            env=os.environ | processes.one_gpu(os.environ),
        )

    def __exit__(self, *error):
        self._process.kill()
        self._process.wait()

    def result(self, timeout):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            done = pool.submit(self._read)
            try:
                found = done.result(max(0, timeout))
            except concurrent.futures.TimeoutError:
                self._process.kill()
                return processes.Outcome(None, f"ended after {timeout:.0f} s")
        if found is None:
            self._words.seek(0)
            code = self._process.wait()
            return processes.Outcome(None, processes.reason(code, self._words.read()))
        return processes.Outcome(found)

    def _read(self):
        for line in self._process.stdout:
            if line.startswith("FIGURES "):
                return json.loads(line.removeprefix("FIGURES "))
        return None

    def proceed(self):
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except OSError:
            pass
