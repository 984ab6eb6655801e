"""`--job=train_benchmark` and `inference_benchmark` of the training scripts.

The harness of every benchmark, over batch sizes, lengths, modes and XLA of one training
configuration; tables in the layout of NVIDIA's DeepLearningExamples.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from tfamp import tables
from tfamp.measuring.benchmark import cell_modes, cells, report, runner, statistics
from tfamp.runs import base_config, compare, run_files

# Fields of a configuration that no cell depends on.
_UNUSED = (
    *("data_dir", "manual_dir", "epochs", "eval_batch_size"),
    *("validation_fraction", "limit_examples"),
)


def _benchmark(
    config, job, modes=(), jit=(), batch_sizes=(), sequence_lengths=(), **counts
):
    """The configuration of the benchmark that a job is.

    Args:
      config: The configuration of the model.
      job: "train" or "inference".
      modes, jit, batch_sizes, sequence_lengths: Whose combinations are measured; empty:
        the configuration's.
      **counts: steps, warmup and repeats.
    """
    config = base_config.settle_rewrite(config)
    defaults = base_config.get_config()
    with config.unlocked():
        config.update({name: defaults[name] for name in _UNUSED})
    precision, own = config.precision, config.data.get("sequence_length")
    mixed, _ = compare.mixed_mode(precision.mode, precision.graph_rewrite)
    if precision.graph_rewrite:
        mixed = mixed.replace("mixed", "rewrite")
    own_jit = {None: "auto", True: "on", False: "off"}[config.jit_compile]
    if sequence_lengths and not own:
        raise ValueError(
            "Only texts have a sequence length. Received: sequence lengths "
            f"{sequence_lengths} for config.task={config.task!r}."
        )
    benchmark, task = cells.get_config(), cells.get_task(config)
    task.update(
        {
            "modes": modes or (*cell_modes.plain_modes(), mixed),
            "jit": jit or (own_jit,),
            "frameworks": ("tfamp",),
            "batch_sizes": batch_sizes,
            "sequence_lengths": sequence_lengths or ((own,) if own else ()),
        }
    )
    benchmark.update(
        {
            "name": f"{config.name}-{job}-benchmark",
            "job": job,
            "seed": config.seed,
            "tasks": {config.name: task},
            **counts,
        }
    )
    return benchmark


def identity(config, settings: Mapping[str, Any]):
    """Returns the configuration of a job's folder: what its cells share.

    Args:
      config: The configuration of the model.
      settings: Keywords of `_benchmark`. More cells and more repeats go on from those
        there are.
    """
    return cells.identity(_benchmark(config, **settings))


def plan(config, settings: Mapping[str, Any]) -> list[cells.Cell]:
    """Returns the cells.

    Args:
      config: The configuration of the model.
      settings: As of `identity`.

    Raises:
      DataError: If the preset is missing or malformed.
      ValueError: If a setting is invalid, or a mode is unknown.
    """
    benchmark = _benchmark(config, **settings)
    planned = cells.plan(benchmark)
    runner.check(benchmark, planned)
    return planned


def run(
    config,
    workdir: str | os.PathLike,
    settings: Mapping[str, Any],
) -> str:
    """Measures every cell and writes `report.md`, `report.html` and `benchmark.json`.

    Args:
      config: The configuration; its data are not used.
      workdir: The benchmark's folder.
      settings: As of `identity`.

    Returns:
      The text of `report.md`.

    Raises:
      DataError, ValueError: As `runner.run`.
      RunError: As there.
    """
    benchmark_report = runner.run(_benchmark(config, **settings), workdir)
    table = tables.of_dicts(published(benchmark_report))
    text = f"{benchmark_report.to_markdown()}\n## In NVIDIA's layout\n\n{table}\n"
    run_files.write_text(pathlib.Path(workdir, "report.md"), text)
    return text


def published(benchmark_report: report.Report) -> list[dict[str, str]]:
    """Returns the cells that have figures, as texts by column in NVIDIA's layout.

    Args:
      benchmark_report: The report.
    """
    by_cell = {row.cell: row for row in benchmark_report.rows if not row.failed}
    return report.told(
        [_line(r, by_cell.get(r.base), benchmark_report) for r in by_cell.values()]
    )


def _line(row, base, benchmark_report):
    unit = benchmark_report.tasks[row.cell.task]["unit"]
    sizes = row.cell.batch_size, base.cell.batch_size if base else "-"
    own = base.cell.mode if base else ""
    rates = {
        name: f"{base.rate:.2f}" if own == mode else "-"
        for name, mode in (("FP32", "float32"), ("TF32", "tf32"))
    }
    name = "TF32" if benchmark_report.base == "tf32" else "FP32"
    return {
        "GPU/CPU": benchmark_report.machine["machine"],
        "sequence length": str(row.cell.sequence_length or "-"),
        f"batch size (mode, {name})": ", ".join(map(str, sizes)),
        "mode": row.cell.mode,
        "XLA": "on" if row.xla else "off",
        f"throughput mode ({unit}/s)": f"{row.rate:.2f}",
        **{f"throughput {name} ({unit}/s)": rate for name, rate in rates.items()},
        **{f"latency {name} (ms)": f"{x:.1f}" for name, x in row.latency_ms.items()},
        "speed-up": statistics.times(row.speed_up),
        "error": row.error,
    }
