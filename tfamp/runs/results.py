"""What came of a run: `result.json`, and everything that a run has written."""

import json
import math
import os
import pathlib
import platform
import statistics
from typing import Any, NamedTuple

import keras
from ml_collections import config_dict

from tfamp import errors
from tfamp.facts import hardware, names, switches, versions
from tfamp.precision import control
from tfamp.runs import run_files

_PACKAGES = ("tfamp", "tensorflow", "keras", "numpy", "ml_dtypes", "keras-hub")


class RunResult(NamedTuple):
    """The outcome of one run; also `result.json`.

    Attributes:
      mode: Mode in force.
      seed: Seed of the run.
      score: The task's score on the test split, with the best checkpoint; None if not
        finite.
      score_name: Name of the score.
      test_loss: Loss on the test split, with the best checkpoint and the label
        smoothing of the training; None if not finite.
      final_loss: Training loss of the last epoch; None if not finite.
      best_validation_score: Score that selected the best checkpoint; None without
        selection.
      steps_per_second: Median over the epochs, without the first if there are more;
        None for epochs of one step.
      skipped_steps: Steps skipped; None without loss scaling.
      loss_scale: Loss scale after the last step; None without loss scaling.
      description: Line that describes the task.
      reason: Why this mode was chosen.
      graph_rewrite: The requested graph rewrite, and what the first training step
        showed of it; empty without one.
      scores: Every score on the test split by name, `score_name` first; None where
        not finite.
      errors: Names of scores that are errors, of which lower is better, in any unit.
        The others are fractions.
      loss_scaling: Whether loss scaling was allowed where the mode needs it.
      batch_size: Examples in a batch of all replicas; 0 if the data determine it.
      nonfinite_losses: How many losses of the last epoch were not finite; `final_loss`
        is the mean of the others.
      chance: What a constant answer scores; None where not known.
      at_chance: Whether `score` is no better, by the rule of `at_chance` below.
    """

    mode: str
    seed: int
    score: float | None
    score_name: str
    test_loss: float | None
    final_loss: float | None
    best_validation_score: float | None
    steps_per_second: float | None
    skipped_steps: int | None
    loss_scale: float | None
    description: str
    reason: str
    graph_rewrite: str
    scores: dict[str, float | None]
    errors: list[str]
    loss_scaling: bool
    batch_size: int
    nonfinite_losses: int = 0
    chance: float | None = None
    at_chance: bool = False

    @property
    def variant(self) -> str:
        """The mode, with a note if it ran without the loss scaling that it needs."""
        return variant(self.mode, self.loss_scaling)


def variant(mode: str, loss_scaling: bool) -> str:
    """Returns what a run is called: its mode, with a note if it needs loss scaling."""
    return mode if loss_scaling else f"{mode}, no loss scaling"


def finish(
    folder: pathlib.Path, scores: dict[str, float | None], **facts: Any
) -> RunResult:
    """Writes the result of a run, with what its metrics say of the epochs.

    Args:
      folder: The run's folder.
      scores: Those of the test split, the task's own first; None where not finite.
      **facts: The other fields of a `RunResult`.
    """
    epochs = run_files.read_metrics(folder, "epoch")
    last = epochs[-1]
    speeds = [row["steps_per_second"] for row in epochs]
    speeds = [speed for speed in speeds[1:] or speeds if speed]
    skipped = last.get("skipped_steps")
    result = RunResult(
        score=next(iter(scores.values())),
        score_name=next(iter(scores)),
        final_loss=last["loss"],
        nonfinite_losses=last["nonfinite_losses"],
        steps_per_second=statistics.median(speeds) if speeds else None,
        skipped_steps=None if skipped is None else int(skipped),
        loss_scale=last.get("loss_scale"),
        scores=scores,
        **facts,
    )
    run_files.write_json(folder / "result.json", result._asdict())
    return result


def at_chance(
    score: float | None, chance: float | None, examples: int, is_error: bool = False
) -> bool:
    """Whether a score shows nothing that a constant answer would not.

    Args:
      score: The score; None where it is not finite.
      chance: That of a constant answer; None where not known.
      examples: How many were scored; below 1 where not known. A fraction must be two of
        its standard errors above `chance`.
      is_error: Whether it is an error, which must be below.
    """
    if score is None or chance is None:
        return False
    if is_error:
        return score >= chance
    variance = max(chance * (1 - chance), 0) / examples if examples > 0 else 0.0
    return score <= chance + 2 * math.sqrt(variance)


def json_number(value):
    """Returns a number as JSON can hold it: None where it is not finite."""
    if value is None or isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None


class Run(NamedTuple):
    """The files of a run, read back.

    Attributes:
      config: Settings of the run.
      environment: Versions, devices, and the precision requested and in force.
      steps: The loss over time: a dict for each line of `recorder.Recorder`.
      epochs: Loss, metrics and seconds of each epoch, as dicts.
      result: The `RunResult`; None while the run is not finished.
    """

    config: config_dict.ConfigDict
    environment: dict[str, Any]
    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    result: RunResult | None


def read_run(folder: str | os.PathLike) -> Run:
    """Reads the files of a run, which may be one that is not finished.

    ```python
    run = tfamp.training.read_run("runs/digits/mixed_float16/seed0")
    pandas.DataFrame(run.steps).plot("step", "loss")
    ```

    Args:
      folder: The run's folder; in a comparison `MODE/seedN`.

    Returns:
      A `Run`.

    Raises:
      RunError: If the folder holds no run, or what this version does not read.
    """
    folder = pathlib.Path(folder)
    config, file = run_files.read_config(folder), folder / "environment.json"
    return Run(
        config,
        json.loads(file.read_text()),
        run_files.read_metrics(folder, "step"),
        run_files.read_metrics(folder, "epoch"),
        read_result(folder) if (folder / "result.json").exists() else None,
    )


def is_finished(config: config_dict.ConfigDict, folder: pathlib.Path) -> bool:
    """Whether a run's folder holds the result of as many epochs as requested."""
    there = (folder / "result.json").exists()
    return there and run_files.read_config(folder).epochs == config.epochs


def read_result(folder: pathlib.Path) -> RunResult:
    """Returns what a finished run wrote.

    Raises:
      RunError: If the file holds no such thing.
    """
    file = folder / "result.json"
    try:
        return RunResult(**json.loads(file.read_text()))
    except (TypeError, ValueError) as e:
        raise errors.RunError(
            f"{str(file)!r} is not a result that this version of tfamp can read. "
            f"Received: {e}. Pass another --workdir, or delete the file to score the "
            "run again."
        ) from e


def write_environment(
    folder: pathlib.Path,
    status: control.Status,
    model: keras.Model,
    distribution: dict[str, Any],
    **settings: Any,
) -> None:
    """Writes `environment.json`: versions, devices, requested and effective precision.

    Args:
      folder: The run's folder.
      status: The precision.
      model: The model, of which the number of embeddings is told.
      distribution: What `distribution.describe` says of the strategy.
      **settings: What else was requested and is in force.
    """
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "packages": {name: versions.installed(name) for name in _PACKAGES},
        "precision": status._asdict(),
        "embedding_layers": sum(
            isinstance(layer, keras.layers.Embedding)
            for layer in names.flatten_layers(model)
        ),
        "kernel_switches": [each._asdict() for each in switches.describe()],
        "distribution": distribution,
        **settings,
        "support": {
            device: {name: each._asdict() for name, each in formats.items()}
            for device, formats in hardware.detect_support().items()
        },
    }
    run_files.write_json(folder / "environment.json", environment)
