"""The same run in float32 and in a mixed mode, side by side."""

import contextlib
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from tfamp import errors, extras, progress
from tfamp.facts import hardware, modes
from tfamp.precision import settings
from tfamp.runs import (
    base_config,
    distribution,
    optimizers,
    plots,
    results,
    run_files,
    tasks,
    trained,
    trainer,
    verdict,
)


class Variant(NamedTuple):
    """A row of a comparison.

    Attributes:
      mode: A precision mode.
      loss_scaling: Whether loss scaling is allowed where the mode needs it.
    """

    mode: str
    loss_scaling: bool = True

    @property
    def folder(self) -> str:
        """Name of the folder with its runs."""
        return self.mode if self.loss_scaling else f"{self.mode}_unscaled"

    @property
    def label(self) -> str:
        """As `RunResult.variant`."""
        return results.variant(self.mode, self.loss_scaling)


def mixed_mode(requested: str, rewrite: bool = False) -> tuple[str, str]:
    """Returns the mode to set beside float32, and a note on the choice.

    Args:
      requested: A mode or "auto"; where that comes to float32, mixed_bfloat16.
      rewrite: Whether the mode names the format of a graph rewrite.

    Returns:
      (mode, note).

    Raises:
      ValueError: If the mode is unknown or not supported on this host.
    """
    if rewrite:
        dtype = requested.removeprefix("mixed_")
        dtype, reason = settings.resolve_rewrite(dtype)
        return f"mixed_{dtype}", f"mode mixed_{dtype}, by graph rewrite: {reason}"
    chosen, reason = settings.resolve_mode(requested)
    mode = chosen.name
    if mode != "float32":
        return mode, f"mode {mode}: {reason}"
    support = hardware.format_support("bfloat16", hardware.read_devices())
    why = "the mode for this host" if requested == "auto" else "the requested mode"
    return "mixed_bfloat16", (
        f"float32 is {why}; mixed_bfloat16 is shown for comparison: {support.reason}"
    )


def compare(
    config,
    workdir,
    seeds: int = 1,
    report: Callable[[str], object] = progress.say,
) -> verdict.Comparison:
    """Trains in float32 and in the mixed mode, and exports the mixed model.

    All have the same seeds, data order and epochs, but for what `config.float32` sets
    for the float32 runs alone. With `config.compare_unscaled` the mixed mode is run
    without loss scaling, too. Finished runs in the folder are not repeated. Writes the
    SavedModel `export/`, `comparison.png`, `report.md` and, last of all,
    `comparison.json`.

    Args:
      config: The configuration; `config.precision.mode` is the mixed mode.
      workdir: Folder; the runs go to `MODE/seedN` inside, those without loss scaling to
        `MODE_unscaled/seedN`.
      seeds: How many seeds, from `config.seed` on.
      report: Function called with a line on each run before it starts, and of its
        progress.

    Returns:
      A `verdict.Comparison`.

    Raises:
      RunError: If the folder holds a run or a benchmark.
      ValueError: If `seeds` is below 1; else as `train_and_evaluate`.
    """
    extras.require("scipy")  # Of the verdict: before anything is trained.
    strategy = distribution.create(config)  # Before anything uses TensorFlow.
    configs, note = plan(config, seeds)
    folder = run_files.open_folder(None, workdir, "comparison")
    folders = {key: folder / key[0].folder / f"seed{key[1]}" for key in configs}
    chief = distribution.is_chief(strategy)
    with run_files.locked(folder) if chief else contextlib.nullcontext():
        for key, run in folders.items():
            run_files.open_folder(configs[key], run)  # Refuses other settings at once.

        @functools.cache  # Once, and only if it is needed: a corpus can take a while.
        def task():
            with progress.Progress(what="reading the data", say=report):
                return tasks.from_config(config)

        last = [*configs][-1]  # Of the mixed mode.
        mixed, done = configs[last], results.is_finished(configs[last], folders[last])
        if mixed.precision.overrides and config.strategy == "none" and not done:
            # A pattern that matches no layer: before float32 is trained.
            made = task()  # Under no mode: it is that of all runs.
            check_run(mixed, lambda _: made)
        run_results = []
        for number, (key, run) in enumerate(folders.items(), 1):
            done = results.is_finished(configs[key], run)
            text = f"{key[0].label}, seed {key[1]}{' (finished before)' * done}"
            report(f"run {number} of {len(folders)}: {text}")
            run_task = None if done else task()
            result = trainer.train_and_evaluate(configs[key], run, run_task, report)
            # Each worker has a clock of its own: what the chief has written counts.
            run_results.append(result if chief else results.read_result(run))
        compared = _read(folder, run_results)
        if chief and compared is None:
            report("exporting the mixed model in float32")
            with progress.Progress(what="exporting", say=report):
                compared = _finish(config, task(), run_results, note, folders, folder)
        distribution.wait(strategy)
        return compared or _read(folder, run_results)


def check_run(config, create: Callable[[Any], tasks.Task]) -> None:
    """Builds a run's model, and raises what is wrong with its settings or data.

    Args:
      config: The configuration of the run.
      create: Function of the configuration; returns the task.
    """
    strategy = distribution.create(config)
    with trainer.enabled(config.precision):
        task = create(config)
        with distribution.scope(strategy):
            optimizers.build(task, config)


def plan(config, seeds: int = 1) -> tuple[dict[tuple[Variant, int], Any], str]:
    """Returns the configurations of a comparison's runs, all of them valid.

    Args:
      config: The configuration.
      seeds: How many seeds.

    Returns:
      ({(variant, seed): configuration}, a note on the choice of the mode).

    Raises:
      ValueError: If a setting is invalid, of one of the runs alone, too.
    """
    if seeds < 1:
        raise ValueError(f"`seeds` must be at least 1. Received: seeds={seeds}.")
    base_config.validate(config)
    config = base_config.settle_rewrite(config)
    mixed, note = mixed_mode(config.precision.mode, config.precision.graph_rewrite)
    needed = modes.get_mode(mixed).needs_loss_scale
    if config.compare_unscaled and not needed:
        raise ValueError(
            "Only modes with loss scaling can be compared without it. Received: "
            f"config.compare_unscaled=True and the mode {mixed!r}. Expected "
            "config.precision.mode='mixed_float16'."
        )
    scaled = config.precision.loss_scale.enabled or not needed
    variants = [Variant(mixed, scaled)]
    if config.compare_unscaled and scaled:
        variants.insert(0, Variant(mixed, False))
    configs = {
        (each, seed): config_of(config, each.mode, seed, each.loss_scaling)
        for seed in range(config.seed, config.seed + seeds)
        for each in [Variant("float32"), *variants]
    }
    for one in configs.values():
        distribution.create(one)  # Refuses batches that the replicas cannot share.
    return configs, note


def config_of(config, mode: str, seed: int, loss_scaling: bool | None = None):
    """Returns the configuration of one run: a copy with this mode and seed.

    Args:
      config: The configuration that is compared.
      mode: The run's mode. "float32" and "tf32" have neither overrides nor a rewrite,
        nothing is stored in fewer bits, and they have what `config.float32` says.
      seed: The run's seed.
      loss_scaling: Whether loss scaling is allowed where the mode needs it; None: as
        the configuration says.
    """
    one = config.copy_and_resolve_references()
    one.precision.mode, one.seed = mode, seed
    if loss_scaling is not None:
        one.precision.loss_scale.enabled = loss_scaling
    if one.precision.fused_kernels is None:  # So that what differs is precision.
        one.precision.fused_kernels = True
    own = one.float32.to_dict()
    # A run does not depend on these: it resumes with other columns requested.
    one.float32.update(dict.fromkeys(own))
    one.compare_unscaled = False
    if mode in ("float32", "tf32"):  # The twin is float32 in every layer and graph.
        one.batch_size = own["batch_size"] or one.batch_size
        rate = own["learning_rate"] or one.optimizer.learning_rate
        one.optimizer.learning_rate = rate
        one.precision.graph_rewrite, one.precision.overrides = False, ()
        one.precision.optimizer_state = one.precision.weights = "float32"
    return one


def _read(folder, run_results):
    """Returns the comparison of just these runs if the folder holds it whole."""
    figure = [plots.COMPARISON] if plots.can_draw() else []
    if not all((folder / name).exists() for name in ("report.md", "export", *figure)):
        return None
    try:
        stored = json.loads((folder / "comparison.json").read_text())
        there = [results.RunResult(**each) for each in stored["results"]]
    except (OSError, TypeError, ValueError):
        return None  # None yet, damaged, or of another version: made anew.
    if (stored["schema_version"], there) != (verdict.SCHEMA_VERSION, run_results):
        return None
    fields = (stored[name] for name in ("note", "export", "environment"))
    return verdict.Comparison(stored["name"], run_results, *fields)


def _finish(config, task, run_results, note, folders, folder):
    """Exports the first mixed model and writes the comparison of finished runs."""
    # From here on the other files are not those of an earlier comparison.
    (folder / "comparison.json").unlink(missing_ok=True)
    mixed = list(folders)[-1][0]
    first = next(key for key in folders if key[0] == mixed)
    exported = _export(task, folders[first], folder / "export")
    environments = {
        f"{variant.label} seed {seed}": json.loads(
            (run / "environment.json").read_text()
        )
        for (variant, seed), run in folders.items()
    }
    environment = environments[f"{mixed.label} seed {first[1]}"]
    note = "; ".join(filter(None, [note, _other_environments(environments)]))
    compared = verdict.Comparison(config.name, run_results, note, exported, environment)
    runs = {(each.label, seed): run for (each, seed), run in folders.items()}
    write(compared, folder, runs)
    return compared


def write(compared: verdict.Comparison, folder: pathlib.Path, runs) -> None:
    """Writes `comparison.png`, `report.md` and `comparison.json`.

    Args:
      compared: The comparison.
      folder: Its folder.
      runs: Dict from (mode, seed) to the run's folder.
    """
    title = f"{compared.name}: the same run in each precision"
    plots.write_runs(folder / plots.COMPARISON, title, runs)
    run_files.write_text(folder / "report.md", compared.to_markdown())
    # The last: it says that the others are all there.
    run_files.write_json(folder / "comparison.json", compared.to_dict())


def _export(task, run, path):
    """Exports a run's best model, verified on the task's own test examples."""
    file = run / "model.keras"
    try:
        model = keras.models.load_model(file, compile=False)
    except ValueError as e:  # Keras says "File not found" of a damaged one.
        raise errors.RunError(
            f"{str(file)!r} cannot be read as a model. Received: {e} Delete "
            f"{str(run)!r} and give the same command again, which repeats that run."
        ) from e
    report = trained.save(task, model, path)
    facts = {**report.to_dict(), "path": path.name}  # Relative: folders get moved.
    return json.loads(json.dumps(facts))  # As it is read from `comparison.json`.


def _other_environments(environments):
    """A note where runs are of other versions or devices: more seeds, a year later."""
    platforms = {
        run: (each["precision"]["device"], each["packages"])
        for run, each in environments.items()
    }
    first = next(iter(platforms))
    others = [run for run, facts in platforms.items() if facts != platforms[first]]
    if not others:
        return ""
    return (
        f"{', '.join(others)}: of other versions or another device than {first}, see "
        "`environment.json`"
    )
