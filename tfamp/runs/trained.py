"""What can be done with a run that has been trained: score, predict, export."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import keras

from tfamp import errors, extras
from tfamp.resume import backup
from tfamp.runs import optimizers, run_files, tasks, trainer
from tfamp.serving import export as serving

_TABLES = {".csv": ",", ".tsv": "\t"}
_LINES = (".jsonl", ".ndjson")
ASSETS = "assets.extra"  # The folder that a SavedModel has for its users' files.


@contextlib.contextmanager
def opened(
    config, folder: pathlib.Path
) -> Iterator[tuple[tasks.Task, keras.Model, str, str]]:
    """Scopes the precision of a run, with its model in the state that it has reached.

    Args:
      config: The run's configuration; its strategy has no say, one device is used.
      folder: The run's folder.

    Yields:
      (its task; its compiled model with the weights that its validation has chosen,
      without one with those after its last epoch or backup; the name of the task's
      first metric; where the weights are from, and whether it is unfinished, as text).

    Raises:
      RunError: If nothing has been saved yet.
    """
    with trainer.enabled(config.precision):
        keras.utils.set_random_seed(config.seed)
        task = tasks.from_config(config)
        model, metric = optimizers.build(task, config)
        weights = _load(model, folder)
        if not (folder / "result.json").exists():
            done = len(run_files.read_metrics(folder, "epoch"))
            weights += (
                f"; the run is unfinished, with {done} of {config.epochs} epochs: the "
                "command that trained it trains the rest"
            )
        yield task, model, metric, weights


def _load(model, folder):
    for name in ("best.weights.h5", "model.keras"):
        file = folder / name
        if file.exists():
            try:
                model.load_weights(file)
            except (OSError, ValueError) as e:
                raise errors.RunError(
                    f"{str(file)!r} cannot be read. Received: {e}"
                ) from e
            return name
    saved = backup.BackupAndRestore(folder / "backup")
    saved.set_model(model)
    if saved.find(saved.folder) == backup.Position():
        raise errors.RunError(
            f"The run in {str(folder)!r} has saved no weights yet. Train it first, by "
            "--job=train."
        )
    saved.restore_model()
    return f"the backup after {saved.told(saved.position)}"


def evaluate(config, folder: pathlib.Path) -> dict[str, Any]:
    """Scores a run on its test split; writes `evaluation.json`, and what the task does.

    Args:
      config: The run's configuration; `eval_batch_size` may be another.
      folder: The run's folder.

    Returns:
      {"weights": where they are from, "test_loss", "scores": by name, "chance" and
      "at_chance": as a `RunResult` has them}.
    """
    with opened(config, folder) as (task, model, metric, weights):
        loss, scores = trainer.score(model, task, config, folder, metric)
        at_chance = trainer.at_chance(task, scores)
    evaluation = {
        "weights": weights,
        "test_loss": loss,
        "scores": scores,
        "chance": task.chance,
        "at_chance": at_chance,
    }
    run_files.write_json(folder / "evaluation.json", evaluation)
    return evaluation


def predict(
    config, folder: pathlib.Path, source: str, target: pathlib.Path
) -> tuple[int, str]:
    """Answers the rows of a file, and writes them with the answers to another.

    Args:
      config: The run's configuration.
      folder: The run's folder.
      source: A CSV, TSV or JSON lines file with the columns of the run's data.
      target: The file to write; its ending says how.

    Returns:
      (number of rows, where the weights are from).

    Raises:
      DataError: If the file cannot be read, lacks a column, or has a bad row.
      RunError: If the task predicts nothing.
      TypeError: If its `predict` returns anything but a table of as many rows.
      ValueError: If an ending is unknown.
    """
    for path in (source, target):
        if (ending := pathlib.Path(path).suffix) not in (*_TABLES, *_LINES):
            raise ValueError(
                "Rows are read from, and written to, files that end in "
                f"{', '.join((*_TABLES, *_LINES))}. Received: {str(path)!r}, which "
                f"ends in {ending!r}."
            )
    rows = _read(pathlib.Path(source))
    with opened(config, folder) as (task, model, _, weights):
        if task.predict is None:
            raise errors.RunError(
                f"This task predicts no rows. Received: config.task={config.task!r}, "
                "whose `predict` is None. Use its exported model, by --job=export."
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            answers = task.predict(model, rows, target.parent)
        except Exception as error:  # An absent column, say, or a word for a number.
            if not isinstance(error, errors.TfampError):  # Those name what is wrong.
                error.add_note(
                    f"{source} has the columns {', '.join(map(repr, rows))}."
                )
            raise
    if not isinstance(answers, type(rows)) or len(answers) != len(rows):
        raise TypeError(
            f"`predict` of {config.task} must return a pandas.DataFrame with a row for "
            f"each of {len(rows)}. Received: {type(answers).__name__} of shape "
            f"{getattr(answers, 'shape', None)}."
        )
    _write(rows.assign(**{name: answers[name].to_numpy() for name in answers}), target)
    return len(rows), weights


def _read(path):
    """Returns the rows of a file as text, "" where there is none."""
    pandas = extras.require("pandas")
    separator = _TABLES.get(path.suffix)
    try:
        if separator is None:
            rows = pandas.read_json(path, lines=True, dtype=False)
        else:
            rows = pandas.read_csv(
                path, sep=separator, dtype=str, keep_default_na=False
            )
    except (OSError, ValueError) as e:
        reason = " ".join(str(e).split())
        raise errors.DataError(f"{path} cannot be read: {reason}.") from e
    if rows.empty:
        raise errors.DataError(f"{path} has no rows.")
    return rows.astype("string").fillna("").astype(object)


def _write(rows, path):
    separator = _TABLES.get(path.suffix)
    with run_files.replaced(path) as new:
        if separator is None:
            rows.to_json(new, orient="records", lines=True, force_ascii=False)
        else:
            rows.to_csv(new, sep=separator, index=False)


def export(config, folder: pathlib.Path, precision: str, path: pathlib.Path) -> Any:
    """Exports a run's model, verified on the first examples of its test split.

    Args:
      config: The run's configuration.
      folder: The run's folder.
      precision: What the exported model computes in, as for `tfamp.export`.
      path: Where to; in the run's folder an earlier export is replaced.

    Returns:
      The `ExportReport`.

    Raises:
      ExportError: If the export fails its checks, or the output exists already.
    """
    with opened(config, folder) as (task, model, *_):
        return save(task, model, path, precision, folder in path.parents)


def save(task: tasks.Task, model, path, precision="float32", overwrite=True) -> Any:
    """Exports a task's model with the files that its users need beside it."""
    sample = next(iter(task.test.batch(8)))[0]
    report = serving.export(
        model, path, precision=precision, sample_inputs=sample, overwrite=overwrite
    )
    if task.assets:
        run_files.write_assets(task.assets, path / ASSETS)
    return report
