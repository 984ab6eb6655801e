"""The weights of the best epoch so far, and whether there is room for them."""

import math
import pathlib
import shutil

import keras
import tensorflow as tf

from tfamp import errors
from tfamp.runs import run_files

_ROOM = 2**20  # Bytes to be left on a disk: HDF5's own, metrics and events.


class BestWeights(keras.callbacks.Callback):
    """Keeps the weights of the best epoch, safe against a kill at any instant.

    Of equal scores the first counts; one that is no number is never the best.

    Args:
      path: File to write, ending in ".weights.h5"; replaced in one step.
      metric: Name of the score of the validation split.
      epochs: Logs of the epochs before a resumption.
      lower: Whether a lower score is better.
    """

    def __init__(
        self, path: pathlib.Path, metric: str, epochs: list[dict], lower: bool = False
    ):
        super().__init__()
        self.path, self.monitor = path, f"val_{metric}"
        self._sign = -1 if lower else 1
        scores = [row[self.monitor] for row in epochs]
        signed = [self._sign * score for score in scores if score is not None]
        self._best = max(signed, default=-math.inf)

    def on_epoch_end(self, epoch, logs=None):
        """Writes the weights if the epoch is the best one."""
        score = self._sign * logs[self.monitor]
        if score > self._best:  # False for NaN.
            self._best = score
            _check_room(self.model, self.path)
            with run_files.replaced(self.path) as new:
                self.model.save_weights(new)


def _check_room(model: keras.Model, path: pathlib.Path) -> None:
    """Raises RunError unless a model's variables fit on the disk of a new file.

    HDF5 ends the process with a segmentation fault where it cannot write.
    """
    variables = [*model.variables, *model.optimizer.variables]
    sizes = (tf.as_dtype(v.dtype).size * math.prod(v.shape) for v in variables)
    needed = _ROOM + sum(sizes)
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise errors.RunError(
            f"The disk is full. Received: {free / 2**20:.1f} MiB free for "
            f"{str(path)!r}, which needs {needed / 2**20:.1f} MiB. Make room and give "
            "the same command again: the run resumes after its last backup."
        )
