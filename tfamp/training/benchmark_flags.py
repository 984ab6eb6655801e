"""The command line of the benchmark jobs."""

from absl import flags

from tfamp.training import step_benchmark

# Value of --job -> job of `step_benchmark.Settings`.
JOBS = {"train_benchmark": "train", "inference_benchmark": "inference"}
_TINY = {"steps": 2, "warmup": 1, "repeats": 1}
_PREFIX = "benchmark_"


def define() -> None:
    """Defines the flags; each is a field of `step_benchmark.Settings`."""
    defaults = step_benchmark.Settings._field_defaults
    flags.DEFINE_list(
        "benchmark_batch_sizes", [], "Batch sizes; default: the configuration's."
    )
    flags.DEFINE_list(
        "benchmark_sequence_lengths", [], "Lengths; default: the configuration's."
    )
    flags.DEFINE_list(
        "benchmark_modes", [], "Modes; default: float32 and the configuration's."
    )
    flags.DEFINE_list(
        "benchmark_jit", [], "XLA: auto, on, off; default: as the configuration says."
    )
    for name, text in (
        ("steps", "Timed steps of each process; with accumulation, whole windows."),
        ("warmup", "Steps before them, the first one included."),
        ("repeats", "Processes of each cell, interleaved."),
    ):
        flags.DEFINE_integer(_PREFIX + name, defaults[name], text, lower_bound=1)


def settings(job: str, tiny: bool = False) -> step_benchmark.Settings | None:
    """Returns what the flags ask for; None if the job is no benchmark.

    Args:
      job: Value of --job.
      tiny: Whether a run of seconds is wanted; numbers that were given still count.

    Raises:
      ValueError: If a flag makes no sense, or belongs to another job.
    """
    names = step_benchmark.Settings._fields[1:]
    found = {name: flags.FLAGS[_PREFIX + name] for name in names}
    given = [_PREFIX + name for name, flag in found.items() if flag.present]
    if job not in JOBS:
        if given:
            raise ValueError(
                f"--{given[0]} belongs to --job={' and --job='.join(JOBS)}. "
                f"Received: --job={job}."
            )
        return None
    values = {name: flag.value for name, flag in found.items()}
    if tiny:
        values |= {k: v for k, v in _TINY.items() if not found[k].present}
    return step_benchmark.Settings(
        JOBS[job],
        **values
        | {name: tuple(values[name]) for name in ("modes", "jit")}
        | {name: _integers(name, values[name]) for name in names[:2]},
    )


def _integers(name, values):
    try:
        return tuple(int(value) for value in values)
    except ValueError as error:
        raise ValueError(
            f"--{_PREFIX}{name} must be whole numbers with commas between them. "
            f"Received: {','.join(values)!r}."
        ) from error
