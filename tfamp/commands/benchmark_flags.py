"""The flags of `--job=train_benchmark` and `inference_benchmark`."""

from typing import Any, NamedTuple

from absl import flags

# Value of --job -> job of a benchmark.
JOBS = {"train_benchmark": "train", "inference_benchmark": "inference"}
_TINY = {"steps": 2, "warmup": 1, "repeats": 1}
_PREFIX = "benchmark_"


class Settings(NamedTuple):
    """What a job measures; each is a flag (see `define`), cells all combinations."""

    job: str
    batch_sizes: tuple[int, ...] = ()
    sequence_lengths: tuple[int, ...] = ()
    modes: tuple[str, ...] = ()
    jit: tuple[str, ...] = ()
    steps: int = 20
    warmup: int = 5
    repeats: int = 3


FLAGS = tuple(_PREFIX + name for name in Settings._fields[1:])


def define() -> None:
    """Defines the flags; each is a field of `Settings`."""
    defaults = Settings._field_defaults
    for name, text in (
        (
            "batch_sizes",
            "Batch sizes; default: the configuration's, with float32's if set.",
        ),
        ("sequence_lengths", "Sequence lengths; default: the configuration's."),
        ("modes", "Modes; default: float32, TF32 if supported, the configuration's."),
        ("jit", "XLA: auto, on, off; default: as the configuration says."),
    ):
        flags.DEFINE_list(_PREFIX + name, [], text)
    for name, text in (
        ("steps", "Timed steps per process; whole windows if gradients accumulate."),
        ("warmup", "Untimed steps before the timed ones, including the first."),
        ("repeats", "Processes per cell, interleaved."),
    ):
        flags.DEFINE_integer(_PREFIX + name, defaults[name], text, lower_bound=1)


def settings(job: str, tiny: bool = False) -> Settings:
    """Returns what the flags ask for.

    Args:
      job: Value of --job.
      tiny: Whether a run of seconds is wanted; numbers that were given still count.

    Raises:
      ValueError: If a flag makes no sense.
    """
    job_flags = {name: flags.FLAGS[_PREFIX + name] for name in Settings._fields[1:]}
    values: dict[str, Any] = {name: flag.value for name, flag in job_flags.items()}
    if tiny:
        values |= {k: v for k, v in _TINY.items() if not job_flags[k].present}
    for name in ("modes", "jit"):
        values[name] = tuple(values[name])
    for name in ("batch_sizes", "sequence_lengths"):
        try:
            values[name] = tuple(map(int, values[name]))
        except ValueError as error:
            raise ValueError(
                f"--{_PREFIX}{name} must be integers separated by commas. Received: "
                f"{','.join(values[name])!r}."
            ) from error
    return Settings(JOBS[job], **values)
