"""One training run in one precision mode, for every task, over Keras `fit`."""

import contextlib
import functools
import gc
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Sequence

import keras
from absl import logging

from tfamp import progress
from tfamp.facts import modes, switches
from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.loss_scaling import monitor as loss_scale_monitor
from tfamp.loss_scaling import wrapping
from tfamp.numerics import monitor
from tfamp.precision import control
from tfamp.resume import backup
from tfamp.runs import (
    base_config,
    distribution,
    optimizers,
    pipeline,
    results,
    run_files,
    tasks,
)
from tfamp.runs.callbacks import best_weights, each_epoch, progress_lines, recorder


def train_and_evaluate(
    config,
    workdir,
    task: tasks.Task | None = None,
    report: Callable[[str], object] = progress.say,
) -> results.RunResult:
    """Trains a task, selects the best checkpoint, and scores it once on the test split.

    A killed run resumes after its last whole epoch; one that received SIGTERM, SIGUSR1
    or Ctrl-C resumes at the step. The losses are those of an uninterrupted run. A
    finished run returns its result at once. It resumes if the configuration has more
    epochs and a constant learning rate.

    It writes `config.yaml`, `environment.json`, `metrics.jsonl`, TensorBoard events,
    `best.weights.h5`, `model.keras` and `result.json`. The global dtype policy and
    TF32 flag are restored at the end.

    Under `config.strategy` the replicas share each batch. The losses equal those of one
    replica up to rounding, unless the model has dropout or batch normalization: each
    replica draws its own random numbers and normalizes its own part of the batch. In a
    cluster every worker calls this with the same arguments; all return the result, and
    the chief writes the files.

    Args:
      config: Configuration from `configs/`; `config.precision.mode` is the mode.
      workdir: Folder of the run.
      task: The task of this configuration, if it is already created. Default: it is
        created.
      report: Function called with lines on the start, and on progress if no terminal
        shows Keras' progress bar. By default they go to standard error.

    Returns:
      A `RunResult`.

    Raises:
      RunError: If the folder cannot be written, or holds another run or unreadable
        files.
      DataError: If the data are missing or malformed.
      ValueError: If a setting is invalid.
    """
    base_config.validate(config)
    config = base_config.settle_rewrite(config)
    strategy = distribution.create(config)
    shared = run_files.open_folder(config, workdir)
    chief = distribution.is_chief(strategy)
    with run_files.locked(shared) if chief else contextlib.nullcontext():
        done = results.is_finished(config, shared)
        distribution.check_same(strategy, "finished runs", int(done))
        if done:
            return results.read_result(shared)
        ticks = chief and not sys.stdout.isatty()
        with progress.Progress(say=report, ticks=ticks) as lines:
            task = task or tasks.from_config(config)
            with (
                enabled(config.precision),
                distribution.worker_folder(strategy, shared) as folder,
            ):
                run = _Run(config, shared, folder, task, strategy, lines.say)
                result = run.execute()
    gc.collect()  # Models are reference cycles; the next run wants their memory.
    return result


@contextlib.contextmanager
def enabled(settings):
    """Scopes tfamp and TensorFlow's kernels as a run has them.

    Args:
      settings: The `precision` part of a configuration.
    """
    scaling = base_config.loss_scale_keywords(settings.loss_scale)
    names = "deterministic", "cudnn_autotune", "float16_accumulation"
    with (
        switches.scope(**{name: settings[name] for name in names}),
        control.enabled(
            settings.mode,
            overrides=dict(settings.overrides),
            graph_rewrite=settings.graph_rewrite,
            fused_kernels=settings.fused_kernels,
            loss_scale=scaling if settings.loss_scale.enabled else False,
            sum_embedding_gradients=True,
            remat=settings.remat,
            optimizer_state=settings.optimizer_state,
            weights=settings.weights,
        ),
    ):
        yield


class _Run:
    """The steps of a run over one task."""

    def __init__(self, config, shared, folder, task: tasks.Task, strategy, report):
        self.config, self.shared, self.folder = config, shared, folder
        self.task = task
        self.strategy, self.chief = strategy, distribution.is_chief(strategy)
        self.report = report if self.chief else lambda line: None
        self.steps = pipeline.steps_per_epoch(task.train, config.batch_size)
        self.best, self.bar = folder / "best.weights.h5", sys.stdout.isatty()
        lines = progress_lines.ProgressLines(self.report, self.steps, config.epochs)
        self.progress = [] if self.bar else [lines]

    def execute(self) -> results.RunResult:
        config, status = self.config, control.status()
        keras.utils.set_random_seed(config.seed)
        with distribution.scope(self.strategy):
            model, self.metric = optimizers.build(self.task, config)
        if self.strategy is not None:
            distribution.prepare(self.strategy, model, self.task)
        # Only now: a pattern that matches no layer leaves the folder free.
        # A run that goes on to more epochs is no longer finished.
        (self.folder / "result.json").unlink(missing_ok=True)
        run_files.write_config(config, self.folder)
        run_files.write_assets(self.task.assets, self.folder)
        described = distribution.describe(self.strategy)
        requested, size = config.steps_per_execution, model.steps_per_execution
        results.write_environment(
            self.folder,
            status,
            model,
            {
                "strategy": config.strategy,
                **described,
                "bytes_per_pack": {
                    "requested": config.bytes_per_pack,
                    "effective": distribution.bytes_per_pack(self.strategy),
                },
            },
            steps_per_execution={"requested": requested, "effective": size},
        )
        saved = self._open_backup(model)
        first, done = position = saved.position
        run_files.keep_metrics(self.folder, first, saved.state.get("step", 0))
        start = f"resumed after {saved.told(position)}" if first + done else "start"
        self.report(
            f"{start}: {config.epochs - first} of {config.epochs} epochs, {self.steps} "
            f"steps each{_call_note(requested, size)}"
        )
        self._fit(model, first, saved)
        if self.best.exists():  # None without validation or with a loss of no number.
            model.load_weights(self.best)
        scores = score(
            model, self.task, config, self.folder, self.metric, self.progress
        )
        model.save(self.folder / "model.keras")
        return self._result(status, *scores)

    def _open_backup(self, model):
        """Returns the run's backup, read at a step that all workers have saved."""
        main = self.shared / "backup"
        # Each worker's own: replicas differ in what dropout draws, say.
        index = distribution.worker_index(self.strategy)
        own = main if self.chief else self.shared / f"backup-worker{index}"
        saved = backup.BackupAndRestore(own, delete_checkpoint=False)
        saved.set_model(model)
        saved.replay, saved.say = False, self.report
        exchange = functools.partial(distribution.exchange, self.strategy)
        saved.agree = lambda number: max(exchange(number))
        source = own if own.exists() else main  # There were fewer workers.
        places = self.steps + 1  # Of an epoch: a stop in its validation is one.
        position = saved.find(source)
        least = min(exchange(position.epoch * places + position.calls))
        position = saved.find(source, backup.Position(*divmod(least, places)))
        here = position.epoch * places + position.calls
        distribution.check_same(self.strategy, "finished steps", here)
        return saved

    def _fit(self, model, first, saved):
        config, task = self.config, self.task
        validation = task.validation and pipeline.evaluation_batches(
            self._cached(task.validation), config.eval_batch_size
        )
        batches = functools.partial(
            pipeline.training_batches,
            self._cached(task.train),
            batch_size=config.batch_size,
            seed=config.seed,
            first_epoch=first,
            last_epoch=max(config.epochs, first + 1),
            augment=task.augment,
        )
        if self.chief and not self.bar:  # A terminal shows what is reported beside it.
            print(f"{results.variant(*self._mode())}, seed {config.seed}:", flush=True)
        model.fit(
            distribution.share_out(self.strategy, batches),
            steps_per_epoch=self.steps,
            initial_epoch=first,
            epochs=config.epochs,
            validation_data=validation,
            # Last the backup: what it stores includes the other files.
            callbacks=[*self._callbacks(model.optimizer, saved), saved],
            shuffle=False,  # The pipeline has shuffled.
            verbose=(1 if self.bar else 2) if self.chief else 0,
        )

    def _cached(self, dataset):
        return dataset.cache() if self.config.data.cache else dataset

    def _callbacks(self, model_optimizer, saved):
        every = max(1, self.steps * self.config.epochs // recorder.CURVE_POINTS)
        fit_callbacks = [
            each_epoch.EpochSeeds(self.steps),
            each_epoch.ReplicaStatistics(),
        ]
        if isinstance(model_optimizer, wrapping.LossScaleOptimizer):
            fit_callbacks.append(loss_scale_monitor.LossScaleMonitor(every=every))
        if watched := self.config.precision.numerics:
            folder = self.folder / "numerics"
            fit_callbacks.append(monitor.NumericsMonitor(watched, log_dir=folder))
        saved.also = recorder.Recorder(self.folder / "metrics.jsonl", self.steps, every)
        fit_callbacks += [saved.also, *self.progress]
        if self.task.validation is not None:
            before = run_files.read_metrics(self.folder, "epoch")
            lower = self.metric in self.task.errors
            kept = best_weights.BestWeights(self.best, self.metric, before, lower)
            fit_callbacks.append(kept)
        if importlib.util.find_spec("tensorboard") is None:
            logging.warning('No TensorBoard events: pip install "tfamp[plot]".')
        else:
            events = self.folder / "tensorboard"
            fit_callbacks.append(keras.callbacks.TensorBoard(events, write_graph=False))
        return fit_callbacks

    def _mode(self):
        """The mode, and whether loss scaling is allowed where it is needed."""
        rewrite = graph_rewrite.active()
        mode = f"mixed_{rewrite.dtype}" if rewrite else control.status().effective
        scaled = self.config.precision.loss_scale.enabled
        return mode, scaled or not modes.get_mode(mode).needs_loss_scale

    def _result(self, status, loss, scores) -> results.RunResult:
        mode, loss_scaling = self._mode()
        rewrite = control.status().graph_rewrite if graph_rewrite.active() else ""
        key, epochs = f"val_{self.metric}", run_files.read_metrics(self.folder, "epoch")
        validation = [row[key] for row in epochs if row.get(key) is not None]
        best = min if self.metric in self.task.errors else max
        return results.finish(
            self.folder,
            scores,
            mode=mode,
            seed=self.config.seed,
            test_loss=loss,
            best_validation_score=best(validation, default=None),
            description=self.task.description,
            reason=status.reason,
            graph_rewrite=rewrite,
            errors=sorted(self.task.errors & scores.keys()),
            chance=self.task.chance,
            at_chance=at_chance(self.task, scores),
            loss_scaling=loss_scaling,
            batch_size=self.config.batch_size,
        )


def score(
    model: keras.Model,
    task: tasks.Task,
    config,
    folder: pathlib.Path,
    metric: str,
    progress: Sequence[keras.callbacks.Callback] = (),
) -> tuple[float | None, dict[str, float | None]]:
    """Scores a compiled model on a task's test split.

    Args:
      model: From `optimizers.build`.
      task: Its task, which may write into `folder`.
      config: Its configuration.
      folder: The run's folder.
      metric: Name of the task's first metric.
      progress: Callbacks that report on a long evaluation.

    Returns:
      (loss, scores by name, the task's score first); None where not finite.
    """
    test = pipeline.evaluation_batches(task.test, config.eval_batch_size)
    scores = model.evaluate(test, verbose=0, return_dict=True, callbacks=[*progress])
    loss = scores.pop("loss")
    own = task.score(model, folder) if task.score else {}
    scores = {**(own or {metric: scores[metric]}), **scores, **own}
    number = results.json_number
    return number(loss), {name: number(value) for name, value in scores.items()}


def at_chance(task: tasks.Task, scores: dict[str, float | None]) -> bool:
    """Whether a task's own score, the first, is no better than a constant answer's."""
    name, score = next(iter(scores.items()))
    count = int(task.test.cardinality())
    return results.at_chance(score, task.chance, count, name in task.errors)


def _call_note(requested, size):
    """The note on calls of several steps; empty for calls of one."""
    if requested == size == 1:
        return ""
    why = f": they do not divide by {requested}" if requested > size else ""
    return f", {size} in a call{why}"
