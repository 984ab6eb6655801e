"""The outcome of one training run, and the file that it is read from."""

import json
import pathlib
from typing import NamedTuple

from tfamp import errors as tfamp_errors
from tfamp.training import variants


class RunResult(NamedTuple):
    """The outcome of one run; also `result.json`.

    Attributes:
      mode: Mode in force.
      seed: The run's seed.
      score: The task's score on the test split, best checkpoint; None if not finite.
      score_name: Its name.
      test_loss: Loss on the test split, best checkpoint, with label smoothing if that
        trained; None if not finite.
      final_loss: Training loss of the last epoch; None if not finite.
      best_validation_score: What the best checkpoint was chosen by; None if by nothing.
      steps_per_second: Median over the epochs, the first left out if there are
        more; None for epochs of one step.
      skipped_steps: Steps skipped; None without loss scaling.
      loss_scale: Loss scale after the last step; None without loss scaling.
      description: The task's line.
      reason: Why this mode.
      graph_rewrite: What was asked of the graph rewrite, and what the first training
        step showed of it; empty without one.
      scores: Every score on the test split by name, `score_name` first; None where
        not finite.
      errors: Those of them that are errors: lower is better, in any unit. The others
        are fractions.
      loss_scaling: Whether loss scaling was allowed where the mode needs it.
      batch_size: Examples in a batch of all replicas; None of earlier versions.
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
    graph_rewrite: str = ""
    scores: dict[str, float | None] = {}
    errors: list[str] = []
    loss_scaling: bool = True
    batch_size: int | None = None

    @property
    def variant(self) -> str:
        """The mode, and that it ran without the loss scaling that it needs."""
        return variants.label(self.mode, self.loss_scaling)


def read(file: pathlib.Path) -> RunResult:
    """Returns what a finished run wrote.

    Raises:
      RunError: If the file holds no such thing.
    """
    try:
        return RunResult(**json.loads(file.read_text()))
    except (TypeError, ValueError) as e:
        raise tfamp_errors.RunError(
            f"{str(file)!r} is no result that this version of tfamp reads. Received: "
            f"{e}. Pass another --workdir, or delete the file to score the run again."
        ) from e
