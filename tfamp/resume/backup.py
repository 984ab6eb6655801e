"""Training that resumes at the step where it was stopped, with the same results."""

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import keras

from tfamp import checks, errors
from tfamp.resume import files, replay, variables
from tfamp.resume.files import Backup, Position

_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")
_STOPPED = 128 + signal.SIGTERM  # Exit status of a process that SIGTERM ended.


class BackupAndRestore(keras.callbacks.Callback):
    """Saves the state of `fit`; the same script, run again, resumes at the step.

    It restores the weights, the optimizers with the loss scale and half-filled
    accumulation windows, the states of `keras.random.SeedGenerator`s (dropout), and the
    metrics. It also restores the position in the data: batches that were trained on are
    read again and skipped. The final weights equal those of an uninterrupted run to the
    last bit if the data come in the same order again. For that, call
    `keras.utils.set_random_seed` at the start of the script, or give `shuffle` a seed.
    `keras.callbacks.BackupAndRestore` restarts the epoch instead, on weights that have
    seen a part of it (keras#19179).

    SLURM, Kubernetes and spot machines announce the end of a process by SIGTERM or
    SIGUSR1. On these signals, and on Ctrl-C, the callback saves at the end of the step
    and logs a line. The process then exits with 143; Ctrl-C raises KeyboardInterrupt.

    Put it last in the list of callbacks. It does not restore the states of other
    callbacks, of Python's and NumPy's random numbers, or of `tf.random` operators in a
    layer's own code.

    Args:
      backup_dir: Folder for the backups of this training alone. Any path that
        `tf.io.gfile` writes to will do, such as gs://bucket/folder.
      save_freq: "epoch", or a number of batches. The end of each epoch is saved in
        either case.
      delete_checkpoint: Whether to delete the backups when `fit` ends. If False, a
        second `fit` with more epochs resumes from them.

    Raises:
      RunError: When training begins, if no backup in the folder can be read, or they
        are backups of another model.
      ValueError: If `save_freq` is invalid.
    """

    def __init__(self, backup_dir, save_freq="epoch", delete_checkpoint=True):
        super().__init__()
        if save_freq != "epoch" and not (
            checks.is_integer(save_freq) and save_freq >= 1
        ):
            raise ValueError(
                "`save_freq` must be 'epoch' or a number of batches of at least 1. "
                f"Received: save_freq={save_freq!r}."
            )
        self.folder = os.fspath(backup_dir)
        self.save_freq, self.delete_checkpoint = save_freq, delete_checkpoint
        # The next are for `tfamp.training`. False: its data start at the epoch that
        # `fit` starts at, and it logs the start itself.
        self.replay = True
        # What else goes into a backup: an object with `state` and `set_state`.
        self.also: Any = None
        self.say: Callable[[str], object] = lambda line: sys.stderr.write(f"{line}\n")
        self.agree: Callable[[int], int] = int  # The signal that any worker has got.
        self._signal, self._before = 0, {}
        self._epoch: int | None = None
        self._backup: Backup | None = None

    # ---- Files ----

    @property
    def position(self) -> Position:
        """The position where training resumes."""
        return self._backup.position if self._backup else Position()

    @property
    def state(self) -> dict[str, Any]:
        """The saved state of `also`; empty at the start."""
        return (self._backup and self._backup.facts["also"]) or {}

    def find(self, folder: str | os.PathLike, last: Position | None = None) -> Position:
        """Finds the newest backup that can be read.

        Args:
          folder: Folder to search.
          last: Newest position to consider.

        Returns:
          Its position; the start of training if there is no file.

        Raises:
          RunError: If no file can be read.
        """
        self._backup = files.read(folder, last)
        return self.position

    def restore_model(self) -> None:
        """Assigns the variables of the backup that was found to the model.

        Raises:
          RunError: If it is a backup of another model.
        """
        self._check_same(self._backup.facts, ["model"])
        self._assign(self._backup.arrays, ["model"])

    def _save(self, position):
        groups = variables.of_training(self.model)
        facts = {
            "position": position,
            "began": self._began,
            "kinds": {k: list(map(variables.facts_of, g)) for k, g in groups.items()},
            "also": self.also.state() if self.also else None,
        }
        files.write(self.folder, Backup(position, facts, self._arrays(groups)))
        self._saved = position

    # ---- State ----

    def _lack(self, facts, kind):
        """Returns how variables differ from those of a backup, as text; "" if not."""
        group = variables.of_training(self.model).get(kind, ())
        here = [variables.facts_of(v) for v in group]
        there = facts["kinds"].get(kind, [])
        if [x[1:] for x in here] == [x[1:] for x in there]:  # Names may go on.
            return ""
        pairs = zip(here, there, strict=False)
        differ = [f"{b} -> {a}" for a, b in pairs if a[1:] != b[1:]]
        return differ[0] if differ else f"{len(there)} variables -> {len(here)}"

    def _check_same(self, facts, kinds):
        for kind in kinds:
            if lack := self._lack(facts, kind):
                raise errors.RunError(
                    f"The backup in {self.folder!r} is of another model or "
                    f"optimizer. Received, of {kind}: {lack}. Pass another folder, or "
                    "delete it to train from the start."
                )

    def _arrays(self, groups):
        return {
            f"{name}/{index}/{part}": variables.plain(value.numpy())
            for name, group in groups.items()
            for index, variable in enumerate(group)
            for part, value in enumerate(variables.parts(variable))
        }

    def _values(self):
        """Returns every variable of a replica, and what it holds."""
        every = variables.of_training(self.model).values()
        parts = (part for each in every for v in each for part in variables.parts(v))
        return [(part, part.numpy()) for part in parts]

    def _assign(self, arrays, kinds):
        groups = variables.of_training(self.model)
        for name in kinds:
            for index, variable in enumerate(groups.get(name, ())):
                for part, target in enumerate(variables.parts(variable)):
                    # Of more replicas than there were: as the first one.
                    key = f"{name}/{index}/{part}"
                    value = arrays.get(key, arrays.get(f"{name}/{index}/0"))
                    if value is not None:
                        target.assign(variables.typed(value, target))

    # ---- Keras calls these ----

    def on_train_begin(self, logs=None):
        """Restores the newest backup and installs the signal handlers."""
        self._began, self._saved, self._signal, self._fresh = None, None, 0, True
        files.delete(self.folder, torn=True)
        if self.replay:
            self.find(self.folder)
        if self._backup:
            position, facts, arrays = self._backup
            if self.model.built:
                self._check_same(facts, ("model",))
            # What is built, before other callbacks change it, say the learning rate.
            same = [kind for kind in facts["kinds"] if not self._lack(facts, kind)]
            self._assign(arrays, same)
            self._start = self._values()
            self._began = facts["began"]
            self.model._initial_epoch = position.epoch
            if self.replay:
                self.say(f"resumed after {self.told(position)}, from {self.folder}")
        self._listen()

    def on_epoch_begin(self, epoch, logs=None):
        """Skips batches that were trained on, and restores late-built variables."""
        self._epoch, self._calls, self._batches = epoch, 0, 0
        if not self._fresh:
            return
        self._fresh, backup, self._backup = False, self._backup, None
        self._began = epoch if self._began is None else self._began
        epochs = epoch - self._began if self.replay else 0
        step, restore = None, lambda: None
        if backup:
            self._calls, step = backup.position.calls, self.model.train_function
            # Where an epoch begins, what callbacks have just set counts, such as the
            # learning rate.
            moved = [
                (part, part.numpy())
                for part, before in self._start
                if not self._calls and part.numpy().tobytes() != before.tobytes()
            ]
            self._start = []
            restore = functools.partial(self._restore, *backup[1:], moved)
        replay.pass_over(self.model, epochs, self._calls, step, restore)

    def _restore(self, facts, arrays, moved):
        """Restores all; Keras has built what it builds in the first step."""
        stepped = self._calls or self.replay  # Else the metrics are to come.
        kinds = [kind for kind in facts["kinds"] if kind != "metrics" or stepped]
        self._check_same(facts, kinds)
        self._assign(arrays, kinds)
        for part, value in moved:
            part.assign(value)
        if not self._calls:
            self.model.reset_metrics()
        if self.also:
            self.also.set_state(facts["also"], within=self._calls > 0)

    def on_train_batch_end(self, batch, logs=None):
        """Saves if a backup is due or a signal has arrived."""
        self._calls += 1
        self._batches += self.model.steps_per_execution
        now = Position(self._epoch, self._calls)
        if self.save_freq != "epoch" and self._batches >= self.save_freq:
            self._batches = 0
            self._save(now)
        self._stop_if_asked(now)

    def on_test_begin(self, logs=None):
        """Keeps the training metrics, which validation resets."""
        if self._epoch is not None:
            self._metrics = self._arrays({"metrics": self.model.metrics_variables})

    def on_test_batch_end(self, batch, logs=None):
        """Stops during validation, after the last step of the epoch."""
        if self._epoch is None or not self.agree(self._signal):
            return
        self._assign(self._metrics, ["metrics"])
        self._stop_if_asked(Position(self._epoch, self._calls))

    def on_epoch_end(self, epoch, logs=None):
        """Saves the end of the epoch."""
        self._save(Position(epoch + 1))
        self._calls = 0
        self._stop_if_asked(self._saved)

    def on_train_end(self, logs=None):
        """Deletes the backups if `delete_checkpoint` is set."""
        self._epoch = None
        self._listen_no_more()
        self.model._initial_epoch = None
        if self.delete_checkpoint:
            files.delete(self.folder)

    # ---- Signals ----

    def _listen(self):
        if threading.current_thread() is not threading.main_thread():
            return  # Python tells signals to the main thread alone.
        for name in _SIGNALS:
            if number := getattr(signal, name, None):
                self._before[number] = signal.signal(number, self._hear)

    def _listen_no_more(self):
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._hear:
                signal.signal(number, handler)
        self._before = {}

    def _hear(self, number, frame):
        # A training that ended with an error has not called this callback.
        again = self._signal and number == signal.SIGINT
        if again or not replay.is_training(frame, self.model):
            self._listen_no_more()
            os.kill(os.getpid(), number)
        self._signal = number

    def _stop_if_asked(self, position):
        number = self.agree(self._signal)
        if not number:
            return
        if self._saved != position:
            self._save(position)
        self._listen_no_more()
        name = signal.Signals(number).name
        self.say(f"{name}: saved after {self.told(position)}, in {self.folder}")
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(_STOPPED)

    def told(self, position: Position) -> str:
        """Returns a place as text."""
        step = position.calls * self.model.steps_per_execution
        if not step:
            return f"epoch {position.epoch}"
        return f"step {step} of epoch {position.epoch + 1}"
