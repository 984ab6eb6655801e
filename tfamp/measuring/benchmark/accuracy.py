"""Time to accuracy: seconds of training until the validation score is at a target.

A faster step is worth nothing if more steps are needed. So each mode trains from the
same seeds, on the same data in the same order, and the time is taken until the
validation score first reaches the target.
"""

import pathlib
import statistics as numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import config_dict

from tfamp.measuring.benchmark import cell_modes, statistics
from tfamp.runs import compare, run_files, trainer

_MARGIN = 1e-6  # A score is a float32; it may miss the target by its rounding.
_SHARE = 0.5  # Of the seeds; a ratio of fewer says more of luck than of the mode.


class Row(NamedTuple):
    """A mode's runs over all seeds.

    Attributes:
      task, mode, target: What was trained up to which score.
      seeds, reached: How many runs there were, and how many reached it.
      seconds: Median of the time to the target; None if none did.
      ratio: The base's time over this mode's, of the seeds that reached it in both.
      test_score: Mean over the runs.
      points: {seed: (seconds, score) after each epoch}.
      failed: Why the first run that failed did; "" if none.
      base: The first of `cell_modes.BASES` that was run to the target; "" if none was.
    """

    task: str
    mode: str
    target: float
    seeds: int
    reached: int
    seconds: float | None
    ratio: statistics.Estimate | None
    test_score: float | None
    points: dict[int, list[tuple[float, float]]]
    failed: str = ""
    base: str = ""


def plan(config) -> dict[tuple[str, str, int], config_dict.ConfigDict]:
    """Returns the runs in the order to make them: {(task, mode, seed): configuration}.

    All modes of a seed come before the next seed, and each seed begins with another:
    an interrupted benchmark has whole pairs, and no mode is always the first.

    Args:
      config: The configuration of the benchmark.

    Raises:
      ValueError: If a mode is not supported on this host.
    """
    runs = {}
    for name, each in config.time_to_accuracy.items():
        chosen, _ = compare.mixed_mode(each.config.precision.mode)
        modes = each.modes or (*cell_modes.plain_modes(), chosen)
        for number in range(each.seeds):
            seed, first = each.config.seed + number, number % len(modes)
            for mode in (*modes[first:], *modes[:first]):
                runs[name, mode, seed] = cell_modes.with_mode(each.config, mode, seed)
    return runs


def train(plain: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Makes one run in this process.

    Args:
      plain: The run's configuration as dicts.
      folder: The run's folder.

    Returns:
      Plain data: points, (seconds, validation score) after each epoch; metric, the
      score's name; lower, whether less of it is better; test_score, of the selected
      weights.
    """
    result = trainer.train_and_evaluate(config_dict.ConfigDict(plain), folder)
    rows = run_files.read_metrics(pathlib.Path(folder), "epoch")
    name = next(name for name in result.scores if f"val_{name}" in rows[0])
    return {
        "points": [(row["seconds"], row[f"val_{name}"]) for row in rows],
        "metric": name,
        "lower": name in result.errors,
        "test_score": result.scores[name],
    }


def reached(figures: Mapping[str, Any], target: float) -> float | None:
    """Returns the seconds until a run reached the target; None if it did not.

    Args:
      figures: From `train`.
      target: The score to reach.
    """
    sign = -1 if figures["lower"] else 1
    found = (
        seconds
        for seconds, score in figures["points"]
        if score is not None and sign * (score - target) >= -_MARGIN * target
    )
    return next(found, None)


def summarize(
    task: str, runs: Mapping[str, Mapping[int, Mapping[str, Any]]], target: float
) -> list[Row]:
    """Returns a row for each mode.

    Seeds that did not reach the target in both are left out of the ratio. They are the
    slow ones, and a mode that loses them looks faster than it is: `reached` counts
    those left, and there is no ratio if less than half of the seeds are left.

    Args:
      task: Name of the task.
      runs: {mode: {seed: figures of `train`}}, or {"failed": why there are none}.
      target: The score to reach.

    References:
      Coleman et al., "DAWNBench: An End-to-End Deep Learning Benchmark and
      Competition", NIPS ML Systems Workshop, 2017.
    """
    made = {
        mode: {seed: run for seed, run in own.items() if "failed" not in run}
        for mode, own in runs.items()
    }
    times = {
        mode: {s: t for s, run in own.items() if (t := reached(run, target))}
        for mode, own in made.items()
    }
    rows, base = [], next((mode for mode in cell_modes.BASES if times.get(mode)), "")
    for mode, own in runs.items():
        ratio = statistics.ratio(times[mode], times.get(base, {}))
        enough = ratio is not None and ratio.repeats >= _SHARE * len(own)
        scores = [run["test_score"] for run in made[mode].values()]
        scores = [score for score in scores if score is not None]  # Not finite.
        failed = (run["failed"] for run in own.values() if "failed" in run)
        rows.append(
            Row(
                *(task, mode, target, len(own), len(times[mode])),
                seconds=numbers.median(times[mode].values()) if times[mode] else None,
                ratio=ratio if enough and mode != base else None,
                test_score=numbers.fmean(scores) if scores else None,
                points={seed: run["points"] for seed, run in made[mode].items()},
                failed=next(failed, ""),
                base=base,
            )
        )
    return rows
