"""The command line of the batch-size finder."""

from collections.abc import Sequence
from typing import Any

from absl import flags

from tfamp.training import batch_size_finder

_TINY = 16  # Largest batch of a run of seconds.
_LIMITS = ("memory_limit_mb", "max_batch_size")
_FLAG = "find_batch_size"


def define() -> None:
    """Defines the flags."""
    flags.DEFINE_bool(
        _FLAG,
        False,
        "Instead of a job: find the largest batch size that fits into memory, in "
        "float32 and in the mixed mode, in processes of their own.",
    )
    flags.DEFINE_integer(
        "memory_limit_mb",
        None,
        "Memory in MiB that the batch is to fit into: of the first GPU, else of the "
        "process; default: all of the GPU, else most of what the host has available.",
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "max_batch_size",
        batch_size_finder.Settings().max_batch_size,
        "Largest batch size that is tried.",
        lower_bound=8,
    )


def settings(
    others: Sequence[str], tiny: bool = False
) -> batch_size_finder.Settings | None:
    """Returns what the flags ask for; None if they ask for no search.

    Args:
      others: Flags of jobs that were given; none goes with a search.
      tiny: Whether a run of seconds is wanted; a largest batch that was given counts.

    Raises:
      ValueError: If flags do not go together.
    """
    found: dict[str, Any] = {name: flags.FLAGS[name] for name in _LIMITS}
    if not flags.FLAGS[_FLAG].value:
        given = [name for name, flag in found.items() if flag.present]
        if given:
            raise ValueError(f"--{given[0]} belongs to --{_FLAG}.")
        return None
    if others:
        raise ValueError(
            f"--{_FLAG} is no part of a job. Received: --{', --'.join(others)}. The "
            "mode, XLA and the sequence length are the configuration's."
        )
    limit, largest = (found[name].value for name in _LIMITS)
    if tiny and not found["max_batch_size"].present:
        largest = _TINY
    return batch_size_finder.Settings((), limit, largest)
