"""One's own compiled model in several precision modes, without a configuration."""

import collections.abc
import functools
import gc
import hashlib
import inspect
import itertools
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from ml_collections import config_dict

from tfamp import checks, extras, progress
from tfamp.facts import modes as precision_modes
from tfamp.loss_scaling import monitor as loss_scale_monitor
from tfamp.loss_scaling import wrapping
from tfamp.precision import control, settings
from tfamp.resume import backup
from tfamp.runs import compare, results, run_files, verdict
from tfamp.runs.callbacks import recorder

# Metrics of which a constant answer's score is the share of the largest class.
_ACCURACIES = ("accuracy", "acc", "binary_accuracy", "sparse_categorical_accuracy")


def compare_modes(
    build: Callable[[], keras.Model],
    train: Any,
    validation: Any = None,
    test: Any = None,
    epochs: int = 3,
    modes: Sequence[str] = ("float32", "auto"),
    seeds: int = 1,
    workdir: Any = None,
    *,
    verbose: int = 1,
) -> verdict.Comparison:
    """Trains a custom model in several precision modes and compares the scores.

    Every run has the same initial weights, data and epochs. `build` is called under
    each mode and seed, and the weights after the last epoch are scored.

    ```python
    def build():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
        return model

    print(tfamp.training.compare_modes(build, (x, y), test=(x_test, y_test)).to_text())
    ```

    Args:
      build: Function without arguments that returns a new compiled model at each call.
        A KerasHub task with its preprocessor is such a model.
      train: Training data as `fit` takes it: a tuple of arrays (x, y) or (x, y,
        sample_weight), or a `tf.data.Dataset` or `keras.utils.PyDataset` of batches.
      validation: The same, for the validation curves; None: none.
      test: The same, scored at the end; None: `validation`.
      epochs: Int. Epochs of each run.
      modes: Precision modes. The others are compared with the first. "auto" is the
        mixed mode for this hardware, mixed_bfloat16 if that is float32.
      seeds: Int. Runs of each mode, with seeds from 0. Three or more show whether a
        difference is noise.
      workdir: Folder for the runs, `report.md`, `comparison.json` and `comparison.png`.
        A second call resumes runs that were stopped, at the step if a signal stopped
        them. None: nothing is kept.
      verbose: 1: a line on each run and the lines of `fit`, on standard output, with
        the minutes left; 0: none.

    Returns:
      A `Comparison`: `to_text()` is the table with the verdicts, `results` a
      `RunResult` of each run.

    Raises:
      RunError: If the folder cannot be written, or holds runs of another `build`,
        other data or epochs.
      TypeError: If `build` does not return a compiled Keras model.
      UnsupportedModeError, ValueError: If an argument is invalid, or data can be
        iterated only once.
    """
    extras.require("scipy")  # Of the verdict: before anything is trained.
    checks.check_count("epochs", epochs)
    checks.check_count("seeds", seeds)
    names, note = _resolve(modes)
    test = validation if test is None else test
    _check(build, len(names), seeds, train=train, validation=validation, test=test)
    with (
        tempfile.TemporaryDirectory() as temporary,
        progress.Progress(
            verbose,
            say=functools.partial(print, flush=True),
            ticks=not sys.stdout.isatty(),
        ) as lines,
    ):
        lines.total = len(names) * seeds
        folder = pathlib.Path(temporary if workdir is None else workdir)
        run_files.open_folder(None, folder, "comparison")
        with run_files.locked(folder):
            # So that a changed script is refused, and not given the results of before.
            facts = {
                "epochs": epochs,
                "build": _source(build),
                "train": _shapes(train),
                "test": _shapes(test),
            }
            run_results, folders = [], {}
            for seed, mode in itertools.product(range(seeds), names):
                run = folders[mode, seed] = folder / mode / f"seed{seed}"
                config = config_dict.ConfigDict({"mode": mode, "seed": seed, **facts})
                run_files.open_folder(config, run)
                done = (run / "result.json").exists()
                with lines.part(f"{mode}, seed {seed}", "finished before" * done):
                    if not done:
                        _run(config, run, build, train, validation, test, verbose)
                        gc.collect()  # Models are reference cycles.
                run_results.append(results.read_result(run))
            first = next(iter(folders.values()))
            written = json.loads((first / "environment.json").read_text())
            name = run_results[0].description.partition(":")[0]
            compared = verdict.Comparison(name, run_results, note, {}, written)
            compare.write(compared, folder, folders)
            return compared


def _check(build, count, seeds, **data):
    """Raises where runs of so many modes and seeds cannot be made."""
    if isinstance(build, keras.Model) or not callable(build):
        raise TypeError(
            "`build` must be a function without arguments that returns a new compiled "
            f"model. Received: {type(build).__name__}."
        )
    if data["test"] is None:
        raise ValueError(
            "Runs need a validation or a test set to be scored on. Received: "
            "validation=None, test=None. Expected one of them."
        )
    for name, each in data.items():
        if isinstance(each, collections.abc.Iterator) and count * seeds > 1:
            raise ValueError(
                f"`{name}` can be iterated only once, and there are {count} modes "
                f"and {seeds} seed(s). Received: {type(each).__name__}. Expected "
                "arrays, a tf.data.Dataset or a keras.utils.PyDataset."
            )
        if _is_empty(each):
            raise ValueError(
                f"`{name}` must have a row or more. Received: {_shapes(each)}."
            )


def _resolve(modes):
    """Returns the modes by name, each once, and a note on the choice."""
    precision_modes.check_several(modes)
    chosen = [
        compare.mixed_mode(mode)
        if mode == "auto"
        else (settings.resolve_mode(mode)[0].name, "")
        for mode in modes
    ]
    names = [name for name, _ in chosen]
    if not names or len(set(names)) < len(names):
        raise ValueError(
            "`modes` must be names of precision modes, each once. Received: "
            f"modes={modes!r}, which are {', '.join(names) or 'none'}."
        )
    return names, "; ".join(note for _, note in chosen if note)


def _run(config, folder, build, train, validation, test, verbose):
    """Trains a user's model once, and writes what came of it."""
    with control.enabled(config.mode, graph_rewrite=False) as status:
        keras.utils.set_random_seed(config.seed)
        model = build()
        compiled = getattr(model, "compiled", False)
        if not isinstance(model, keras.Model) or not compiled:
            raise TypeError(
                "`build` must return a compiled keras.Model. Received: "
                f"{type(model).__name__}, compiled: {compiled}."
            )
        run_files.write_config(config, folder)
        results.write_environment(folder, status, model, {"replicas": 1, "workers": 1})
        _fit(model, folder, config.epochs, train, validation, verbose)
        scores = model.evaluate(*_arguments(test), verbose=0, return_dict=True)
        model.save_weights(folder / "model.weights.h5")
    scores = {name: results.json_number(value) for name, value in scores.items()}
    # The first of the metrics is the score; a model without has its loss.
    own = {name: score for name, score in scores.items() if name != "loss"} or scores
    chance, examples = _chance(test, next(iter(own)))
    results.finish(
        folder,
        own,
        mode=status.effective,
        seed=config.seed,
        test_loss=scores["loss"],
        best_validation_score=None,
        description=f"{model.name}: {model.count_params():,} parameters, "
        f"{config.epochs} epochs",
        reason=status.reason,
        graph_rewrite="",
        errors=sorted({"loss", *_errors(model)} & own.keys()),
        loss_scaling=True,
        batch_size=0,  # Of the data, whatever they are.
        chance=chance,
        at_chance=results.at_chance(next(iter(own.values())), chance, examples),
    )


def _chance(test, score):
    """The share of the largest class, and the number of rows; None if not known.

    Known where the score is an accuracy, and labels are an array of one class a row.
    """
    labels = test[1] if isinstance(test, tuple) and len(test) > 1 else None
    labels = np.asarray(labels) if hasattr(labels, "shape") else np.empty(0)
    if score not in _ACCURACIES or not 0 < labels.size == len(labels):
        return None, 0
    counts = np.unique(labels, return_counts=True)[1]
    return float(counts.max() / labels.size), labels.size


def _fit(model, folder, epochs, train, validation, verbose):
    saved = backup.BackupAndRestore(folder / "backup")
    saved.also = recorder.Recorder(folder / "metrics.jsonl")
    fit_callbacks = [saved.also]
    if isinstance(model.optimizer, wrapping.LossScaleOptimizer):
        fit_callbacks.insert(0, loss_scale_monitor.LossScaleMonitor())
    epoch, _ = saved.find(saved.folder)
    run_files.keep_metrics(folder, epoch, saved.state.get("step", 0))
    model.fit(
        *_arguments(train),
        epochs=epochs,
        validation_data=validation,
        callbacks=[*fit_callbacks, saved],
        verbose=verbose and (1 if sys.stdout.isatty() else 2),
        # Keras warns where it ignores it; KerasHub makes a dataset of arrays.
        shuffle=isinstance(train, tuple)
        and getattr(model, "preprocessor", None) is None,
    )


def _source(function):
    """A digest of a function's source; its name where there is none."""
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):  # Typed in, or an object that is called.
        return getattr(function, "__qualname__", type(function).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _shapes(data):
    """The shapes of arrays, and what a dataset's batches are."""
    if isinstance(data, tf.data.Dataset):
        return f"{data.element_spec}, {int(data.cardinality())} batches"
    if isinstance(data, tuple):
        return ", ".join(map(_shapes, data))
    if isinstance(data, dict):
        return str({name: _shapes(part) for name, part in data.items()})
    if isinstance(data, keras.utils.PyDataset):
        return f"{type(data).__name__}, {data.num_batches} batches"
    one_use = isinstance(data, collections.abc.Iterator)
    return type(data).__name__ if one_use else str(np.shape(data))


def _is_empty(data):
    if isinstance(data, tf.data.Dataset):
        return int(data.cardinality()) == 0
    if isinstance(data, keras.utils.PyDataset):
        return data.num_batches == 0
    return any(getattr(x, "shape", (1,))[:1] == (0,) for x in keras.tree.flatten(data))


def _arguments(data):
    return data if isinstance(data, tuple) else (data,)


def _errors(model):
    """Names of metrics of which lower is better, as Keras' callbacks know them."""
    metrics = [
        each
        for metric in model.metrics
        for each in getattr(metric, "metrics", None) or [metric]
    ]
    return [each.name for each in metrics if getattr(each, "_direction", "") == "down"]
