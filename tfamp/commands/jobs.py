"""The jobs of the training scripts: what each does, and what a person reads of it."""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from tfamp import progress
from tfamp.commands import benchmark_jobs
from tfamp.measuring import batch_size, training_steps
from tfamp.runs import (
    compare,
    distribution,
    plots,
    tasks,
    trained,
    trainer,
    verdict,
)


class Job(NamedTuple):
    """What `--job` names.

    Attributes:
      run: Function of the configuration, the folder, and what else was requested;
        returns a summary to print.
      check: Function of the configuration and what else was requested; raises what is
        wrong with settings or data, so that nothing is deleted for such a command. Jobs
        on a run that is there delete nothing.
      identity: Function of the same; returns the configuration of the job's folder.
    """

    run: Callable[[Any, pathlib.Path, Any], str]
    check: Callable[[Any, Any], object] = lambda config, options: None
    identity: Callable[[Any, Any], Any] = lambda config, options: config


def _compare(config, workdir, seeds):
    compared = compare.compare(config, workdir, seeds, report=progress.say)
    exported = workdir / compared.export["path"]
    written = [workdir / "report.md", workdir / plots.COMPARISON]
    return (
        f"{compared.to_text()}\n"
        f"exported in float32, reloaded and verified: {exported}\n"
        f"report and figure: {', '.join(str(p) for p in written if p.exists())}"
    )


def _check_comparison(config, seeds):
    compare.plan(config, seeds)
    _check_run(config)


def _train(config, workdir, _):
    result = trainer.train_and_evaluate(config, workdir, report=progress.say)
    if distribution.is_chief(distribution.create(config)):
        plots.write_timeline(workdir, config.name, result.mode, result.seed)
    rows = {
        "data": result.description,
        "mode": f"{result.variant}: {result.reason}",
        "graph rewrite": result.graph_rewrite or None,
        "seed": result.seed,
        "batch size": result.batch_size,
        "steps/s": result.steps_per_second,
        "skipped steps": result.skipped_steps,
        "final loss scale": result.loss_scale,
        "final training loss": result.final_loss,
        f"validation {result.score_name}": result.best_validation_score,
        "test loss": result.test_loss,
        **{f"test {name}": score for name, score in result.scores.items()},
        "chance level": _chance(result.chance, result.at_chance),
        "files": workdir,
    }
    return _listed(rows)


def _chance(chance, at_chance):
    """What a constant answer scores, and whether the model is no better."""
    if at_chance:
        return f"{chance:.4f}, and the score is no better: {verdict.NOTHING_LEARNED}"
    return chance


def _listed(rows):
    """Returns names and values as lines, without what has no value."""
    width = max(map(len, rows))
    return "\n".join(
        f"{name:<{width}}  " + (f"{x:.4f}" if isinstance(x, float) else f"{x}")
        for name, x in rows.items()
        if x is not None
    )


def _check_run(config, _=None):
    compare.check_run(config, tasks.from_config)


def _evaluate(config, folder, options):
    with progress.Progress(what="scoring"):
        evaluation = trained.evaluate(config, folder)
    rows = {
        "weights": evaluation["weights"],
        "test loss": evaluation["test_loss"],
        **{f"test {name}": score for name, score in evaluation["scores"].items()},
        "chance level": _chance(evaluation["chance"], evaluation["at_chance"]),
        "files": folder / "evaluation.json",
    }
    return _listed(rows)


def _predict(config, folder, options):
    suffix = pathlib.Path(options.input).suffix
    target = pathlib.Path(options.output or folder / f"predicted{suffix}")
    with progress.Progress(what="predicting"):
        count, weights = trained.predict(config, folder, options.input, target)
    return _listed({"weights": weights, "rows": count, "files": target})


def _export(config, folder, options):
    path = pathlib.Path(options.output or folder / "export").absolute()
    return str(trained.export(config, folder.absolute(), options.precision, path))


def _find_batch_size(config, workdir, options):
    sizes = batch_size.find_batch_size(config, workdir=workdir, **options)
    return f"{sizes.to_text()}\nfiles: {workdir}"


def _benchmark(config, workdir, options):
    return f"{benchmark_jobs.run(config, workdir, options)}\nfiles: {workdir}"


JOBS = {
    "compare": Job(_compare, _check_comparison),
    "train": Job(_train, _check_run),
}
# Of a run that is there, trained to its end or stopped.
ON_RUNS = {
    "evaluate": Job(_evaluate),
    "predict": Job(_predict),
    "export": Job(_export),
}
# That of --find_batch_size.
SEARCH = Job(
    _find_batch_size,
    lambda config, options: batch_size.plan(config, **options),
    lambda config, options: training_steps.identity(config, batch_size.STEPS),
)
# Those that time steps, a training or an inference benchmark.
TIMED = Job(_benchmark, benchmark_jobs.plan, benchmark_jobs.identity)
