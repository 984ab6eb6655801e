"""Time to accuracy: seconds of training until the validation score is at a target.

A faster step is worth nothing if more steps are needed. So each mode trains from the
same seeds, on the same data in the same order, and the clock says when the score on the
validation split first was the target or better.
"""

import math
import os
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from tfamp import checks, errors, formats
from tfamp.benchmark import accuracy_notes, records
from tfamp.benchmark import plan as cell_plan
from tfamp.training import (
    base_config,
    run_files,
    trainer,
    verdict,
)

# Their scores are errors: lower is better, in any unit.
_TASKS_WITH_ERRORS = ("language_model", "tabular_regression")
_BASE = accuracy_notes.BASE
_SHARE = 0.5  # Of the seeds; a ratio of fewer says more of luck than of the mode.


def check(config, target: float) -> None:
    """Raises ValueError if a configuration or a target cannot be timed.

    Args:
      config: The configuration of a training run.
      target: Validation score to reach: a fraction in (0, 1]; above 0 where the task's
        score is an error. TypeError if it is no number.
    """
    base_config.validate(config)
    if not config.validation_fraction:
        raise ValueError(
            "Time to accuracy needs a validation split, whose score is compared with "
            f"the target. Received: config.validation_fraction=0 of {config.name!r}. "
            "Set it to, say, 0.1."
        )
    checks.check_real("target", target)
    error = config.task in _TASKS_WITH_ERRORS
    if not (target > 0 and (error or target <= 1)):
        expected = "above 0" if error else "a fraction in (0, 1], such as 0.95"
        raise ValueError(
            f"`target` of the task {config.task!r} must be {expected}. "
            f"Received: target={target!r}."
        )


def plan(
    config, task_name: str, seeds: int, modes: Sequence[str]
) -> dict[tuple[str, int], Any]:
    """Returns the configurations of all runs, in the order to make them.

    All modes of a seed come before the next seed: a machine that is busy for a while
    slows all modes, and an interrupted benchmark has whole pairs. Each seed begins with
    another mode: none is always the first.

    Args:
      config: The configuration of a training run.
      task_name: Name of the task, for errors.
      seeds: How many seeds, from `config.seed` on.
      modes: Keys of `records.VARIANTS`.

    Returns:
      {(mode, seed): configuration}.

    Raises:
      ValueError: If there is no such mode, no mode or no seed; TypeError if `seeds` is
        no integer.
    """
    checks.check_count("seeds", seeds)
    unknown = [mode for mode in modes if mode not in records.VARIANTS]
    if unknown or not modes:
        raise ValueError(
            f"`modes` of the task {task_name!r} must be some of "
            f"{', '.join(records.VARIANTS)}. Received: {tuple(modes)!r}."
        )
    runs = {}
    for number in range(seeds):
        seed, first = config.seed + number, number % len(modes)
        for mode in (*modes[first:], *modes[:first]):
            runs[mode, seed] = cell_plan.with_mode(config, mode, seed)
    return runs


def run(config, workdir: str | os.PathLike) -> None:
    """Makes one run; call it in a process of its own.

    A finished run is not repeated, and a killed one goes on after its last whole epoch.

    Args:
      config: One of those of `plan`.
      workdir: The run's folder.

    Raises:
      RunError, DataError, ValueError: As `trainer.train_and_evaluate`.
    """
    trainer.train_and_evaluate(config, workdir)


def read_metric(folder: pathlib.Path) -> tuple[str, bool]:
    """Returns the score that a finished run is timed by: name, and if it is an error.

    That is the first of the run's scores that its validation has, too: some tasks score
    the test split by more than Keras' metrics.

    Args:
      folder: The run's folder.

    Raises:
      RunError: If the folder holds no finished run, or one without validation scores.
    """
    result = _result(folder)
    name = _metric(result, run_files.read_metrics(folder, "epoch"), folder)
    return name, name in result.errors


def read_run(
    folder: pathlib.Path, task: str, mode: str, target: float
) -> records.AccuracyRun:
    """Reads a finished run: its score over time, and when it reached the target.

    A score is at the target if it misses it by no more than its own rounding, float32.
    A run that was killed and resumed has traced more than once; the later first steps
    are taken off the clock.

    Args:
      folder: The run's folder.
      task: Name of the task.
      mode: The run's mode, a key of `records.VARIANTS`.
      target: Score to reach.

    Returns:
      An `AccuracyRun`; with the reason in `failed` if an earlier version of tfamp made
      the run, without wall time.

    Raises:
      RunError: As `read_metric`.
    """
    result = _result(folder)
    rows = run_files.read_metrics(folder, "epoch")
    metric = _metric(result, rows, folder)
    made = records.AccuracyRun(task, mode, result.seed)
    if any(row.get("seconds") is None for row in rows):
        return made._replace(
            failed="an earlier version of tfamp made the run, without wall time; "
            "delete its folder to make it again"
        )
    points = _points(rows, metric)
    reached = _first_at(points, target, lower=metric in result.errors)
    return made._replace(
        points=points,
        first_step_seconds=rows[0].get("first_step_seconds"),
        reached_seconds=None if reached is None else points[reached][0],
        reached_epoch=None if reached is None else reached + 1,
        test_score=result.scores[metric],
    )


def _result(folder):
    if not (folder / "result.json").exists():
        raise errors.RunError(
            f"{str(folder)!r} holds no finished run. Expected `result.json`. Make the "
            "run first, by `time_to_accuracy.run`."
        )
    return run_files.read_result(folder)


def _metric(result, rows, folder):
    for name in result.scores:
        if any(f"val_{name}" in row for row in rows):
            return name
    raise errors.RunError(
        f"The run in {str(folder)!r} has no validation score. Received: scores "
        f"{', '.join(result.scores)}. Set config.validation_fraction above 0."
    )


def _points(rows, metric):
    """(seconds, score) after each epoch, without the first steps of resumptions."""
    points, repeated = [], 0.0
    for row in rows:
        if points:
            repeated += row.get("first_step_seconds") or 0.0
        points.append((row["seconds"] - repeated, row.get(f"val_{metric}")))
    return tuple(points)


def _first_at(points, target, lower):
    """Index of the first score that is the target or better; None if there is none."""
    margin = 4 * formats.float_format("float32").epsilon * target
    sign = -1 if lower else 1
    for i, (_, score) in enumerate(points):
        if score is not None and sign * (score - target) >= -margin:
            return i
    return None


def summarize(
    runs: Sequence[records.AccuracyRun],
    metric: str,
    target: float,
    is_error: bool = False,
) -> list[records.AccuracyRow]:
    """Returns a row for each task and mode, in the order of the runs.

    Of the seeds i = 1..n that reached the target in float32, in t_i seconds, and in the
    mode, in u_i:

        d_i = ln(t_i / u_i), m = mean of d_i, s = their standard deviation
        ratio = exp(m), interval = exp(m ± t(n - 1) * s / sqrt(n))

    with Student's t at 95 %. The mean is geometric, as the mean of a ratio and that of
    its inverse must tell the same. A seed fixes the first weights and the order of the
    data, so runs are compared in pairs. There is no interval of one seed, and none of
    equal ratios.

    Seeds that did not reach the target in both are left out. They are the slow ones:
    a mode that loses them looks faster than it is. The note tells of them, and there is
    no ratio if less than half of the seeds are left.

    Args:
      runs: Runs of any tasks, modes and seeds, all with this score and target.
      metric: Name of the score.
      target: The score to reach.
      is_error: Whether a lower score is better.

    Returns:
      A list of `AccuracyRow`.

    References:
      Time to accuracy: Coleman et al., "DAWNBench: An End-to-End Deep Learning
      Benchmark and Competition", NIPS ML Systems Workshop, 2017. Geometric mean of
      ratios: Fleming and Wallace, "How not to lie with statistics: the correct way to
      summarize benchmark results", CACM 29 (1986), 218-221,
      https://doi.org/10.1145/5666.5673. Paired t: `verdict.compare`.
    """
    groups: dict[tuple[str, str], dict[int, records.AccuracyRun]] = {}
    for each in runs:
        groups.setdefault((each.task, each.mode), {})[each.seed] = each
    return [
        _row(own, groups.get((task, _BASE), {}), metric, target)._replace(
            is_error=is_error
        )
        for (task, _), own in groups.items()
    ]


def _row(own, base, metric, target):
    first = next(iter(own.values()))
    reached = [each for each in own.values() if each.reached_epoch is not None]
    pairs = _pairs(own, base)
    few = len(pairs) < _SHARE * len(own.keys() | base.keys())
    compared = [] if few or first.mode == _BASE else pairs
    scores = [each.test_score for each in own.values() if not each.failed]
    return records.AccuracyRow(
        *(first.task, first.mode, metric, target, len(own), len(reached)),
        seconds=_spread(map(_seconds, reached)),
        without_first_step=_spread(map(_later_seconds, reached)),
        epochs=_mean([each.reached_epoch for each in reached]),
        ratio=_ratio(compared, _seconds),
        ratio_without_first_step=_ratio(compared, _later_seconds),
        test_score=_mean(scores),
        note=accuracy_notes.write(first.mode, own, base, pairs, bool(compared)),
    )


def _pairs(own, base):
    """[(run of float32, run of the mode)] of the seeds that reached it in both."""
    pairs = [(base[seed], each) for seed, each in own.items() if seed in base]
    return [
        pair for pair in pairs if all(each.reached_epoch is not None for each in pair)
    ]


def _seconds(each):
    return each.reached_seconds


def _later_seconds(each):
    """Seconds to the target without the first step; None if that is not known."""
    if each.first_step_seconds is None:
        return None
    return each.reached_seconds - each.first_step_seconds


def _spread(values):
    values = list(values)
    if not values or None in values:
        return None
    return records.Spread(statistics.median(values), min(values), max(values))


def _mean(values):
    return statistics.fmean(values) if values and None not in values else None


def _ratio(pairs, seconds):
    """(geometric mean, low, high) of float32's seconds over the mode's."""
    times = {mode.seed: (seconds(base), seconds(mode)) for base, mode in pairs}
    if not times or any(None in pair for pair in times.values()):
        return None
    before, after = (
        {seed: math.log(pair[i]) for seed, pair in times.items()} for i in (0, 1)
    )
    found = verdict.compare("log seconds", ("mode", after), (_BASE, before))
    low, high = map(math.exp, found.interval) if found.interval else (None, None)
    return math.exp(found.mean), low, high
