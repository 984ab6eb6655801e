"""The same run in float32 and in a mixed mode, side by side."""

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
from absl import logging

from tfamp import hardware
from tfamp.precision import settings
from tfamp.serving import export
from tfamp.training import (
    base_config,
    comparison,
    distribution,
    figures,
    folder_lock,
    precision_config,
    run_files,
    run_result,
    tasks,
    trainer,
    variants,
)


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
    devices = hardware.read_devices()
    support = hardware.format_support("bfloat16", devices)
    speed = "fast" if support.fast else "slow"
    why = "the mode for this host" if requested == "auto" else "the mode asked for"
    return "mixed_bfloat16", (
        f"float32 is {why}; mixed_bfloat16 is shown for comparison and is {speed} "
        f"here: {support.reason}"
    )


def compare(
    config,
    workdir,
    seeds: int = 1,
    report: Callable[[str], object] = logging.info,
) -> comparison.Comparison:
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
      report: Function that is told of each run before it starts.

    Returns:
      A `comparison.Comparison`.

    Raises:
      RunError: If the folder holds a run or a benchmark.
      ValueError: If `seeds` is below 1; else as `train_and_evaluate`.
    """
    strategy = distribution.create(config)  # Before anything uses TensorFlow.
    config = precision_config.settle_rewrite(config)
    configs, note = plan(config, seeds)
    folder = pathlib.Path(workdir)
    run_files.check_kind(folder, "comparison")
    folders = {
        (column, seed): folder / column.folder / f"seed{seed}"
        for column, seed in configs
    }
    chief = distribution.is_chief(strategy)
    if chief:
        run_files.make_folder(folder)
    with folder_lock.locked(folder) if chief else contextlib.nullcontext():
        return _compare(config, configs, folders, folder, note, report)


def plan(config, seeds: int = 1) -> tuple[dict[tuple[variants.Variant, int], Any], str]:
    """Returns the configurations of a comparison's runs, all of them valid.

    Args:
      config: The configuration.
      seeds: How many seeds.

    Returns:
      ({(column, seed): configuration}, a note on the choice of the mode).

    Raises:
      ValueError: If a setting makes no sense, of one of the runs alone, too.
    """
    if seeds < 1:
        raise ValueError(f"`seeds` must be at least 1. Received: seeds={seeds}.")
    base_config.validate(config)
    config = precision_config.settle_rewrite(config)
    mixed, note = mixed_mode(config.precision.mode, config.precision.graph_rewrite)
    scaled = config.precision.loss_scale.enabled
    columns = variants.create(mixed, scaled, config.compare_unscaled)
    configs = {
        (column, seed): config_of(config, column.mode, seed, column.loss_scaling)
        for seed in range(config.seed, config.seed + seeds)
        for column in columns
    }
    for one in configs.values():
        distribution.create(one)  # Refuses batches that the replicas cannot share.
    return configs, note


def _compare(config, configs, folders, folder, note, report):
    """Makes the runs that there are not, and the comparison."""
    strategy = distribution.create(config)
    for key, run in folders.items():
        run_files.open_folder(configs[key], run)  # Refuses other settings at once.
    stored = _read(folder, folders)
    if stored is not None:
        return stored
    task = tasks.from_config(config)  # Once: reading a corpus can take a while.
    results = []
    for (column, seed), run in folders.items():
        done = " (finished before)" if (run / "result.json").exists() else ""
        place = f"run {len(results) + 1} of {len(folders)}"
        report(f"{place}: {column.label}, seed {seed}{done}")
        result = trainer.train_and_evaluate(configs[column, seed], run, task)
        results.append(result)
    if distribution.is_chief(strategy):
        report("exporting the mixed model in float32")
        _finish(config, task, results, note, folders, folder)
    distribution.wait(strategy)  # The others read what the chief has written.
    return _read(folder, folders)


def _finish(config, task, results, note, folders, folder):
    """Exports the first mixed model and writes the comparison of finished runs."""
    # From here on the other files are not those of an earlier comparison.
    (folder / "comparison.json").unlink(missing_ok=True)
    mixed = list(folders)[-1][0]
    first = next(key for key in folders if key[0] == mixed)
    exported = _export(task, folders[first], folder / "export")
    environments = {key: _environment(run) for key, run in folders.items()}
    note = "; ".join(filter(None, [note, *_other_environments(environments)]))
    compared = comparison.Comparison(
        config.name, results, note, exported, environments[first]
    )
    _write(compared, folder, folders)


def config_of(config, mode: str, seed: int, loss_scaling: bool = True):
    """Returns the configuration of one run: a copy with this mode and seed.

    Args:
      config: The configuration that is compared.
      mode: The run's mode. "float32" and "tf32" have neither overrides nor a rewrite,
        and what `config.float32` says.
      seed: The run's seed.
      loss_scaling: Whether loss scaling is allowed where the mode needs it.
    """
    one = config.copy_and_resolve_references()
    one.precision.mode, one.seed = mode, seed
    one.precision.loss_scale.enabled = loss_scaling
    own = one.float32.to_dict()
    # What a run does not depend on: it goes on where other columns are asked for.
    one.float32.update(dict.fromkeys(own))
    one.compare_unscaled = False
    if mode in ("float32", "tf32"):  # The twin is float32 in every layer and graph.
        one.batch_size = own["batch_size"] or one.batch_size
        rate = own["learning_rate"] or one.optimizer.learning_rate
        one.optimizer.learning_rate = rate
        one.precision.graph_rewrite, one.precision.overrides = False, ()
    return one


def _export(task, run, path):
    """Exports a run's best model, verified on the task's own test examples."""
    sample = next(iter(task.test.batch(8)))[0]
    model = keras.models.load_model(run / "model.keras", compile=False)
    report = export.export_float32(model, path, sample_inputs=sample, overwrite=True)
    return {**report.to_dict(), "path": path.name}  # Relative: folders get moved.


def _environment(run):
    return json.loads((run / "environment.json").read_text())


def _other_environments(
    environments: Mapping[tuple[variants.Variant, int], dict[str, Any]],
) -> Iterator[str]:
    """A note where runs are of other versions or devices: more seeds, a year later."""
    found = {key: _facts(each) for key, each in environments.items()}
    same = set.intersection(*found.values())
    runs = [
        f"{column.label} seed {seed}: {', '.join(sorted(facts - same)) or 'without'}"
        for (column, seed), facts in found.items()
    ]
    if any(facts - same for facts in found.values()):
        yield f"the runs' environments differ: {'; '.join(runs)}"


def _facts(environment):
    packages = {f"{k} {v}" for k, v in environment["packages"].items() if v}
    return {environment["precision"]["device"], *packages}


def _read(folder, folders):
    """Returns the comparison of just these runs if the folder holds it whole."""
    written = [run / "result.json" for run in folders.values()]
    written += [folder / name for name in ("comparison.json", "report.md", "export")]
    written += [folder / figures.COMPARISON] if figures.can_draw() else []
    if not all(path.exists() for path in written):
        return None
    try:
        fields = json.loads((folder / "comparison.json").read_text())
        if fields.pop("schema_version") != comparison.SCHEMA_VERSION:
            return None
        del fields["statistics"]  # They follow from the results.
        fields["results"] = [run_result.RunResult(**row) for row in fields["results"]]
        stored = comparison.Comparison(**fields)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # Damaged, or of another version: made anew from the runs.
    asked = [(column.label, seed) for column, seed in folders]
    same = [(row.variant, row.seed) for row in stored.results] == asked
    return stored if same else None


def _write(compared, folder, folders):
    """Writes the files; `comparison.json` last, which says that they are all there."""
    runs = {(column.label, seed): run for (column, seed), run in folders.items()}
    figures.write_comparison(folder, compared.name, runs)
    run_files.write_text(folder / "report.md", compared.to_markdown())
    text = json.dumps(compared.to_dict(), indent=2)
    run_files.write_text(folder / "comparison.json", text)
