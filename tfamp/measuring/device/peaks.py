"""The peak of TensorFlow's allocator beside what `memory` computes."""

from typing import Any

from ml_collections import config_dict

from tfamp.facts import switches
from tfamp.measuring import process_memory, workloads
from tfamp.runs import trainer
from tfamp.storage import step_memory

_STEPS = 4


def measure(plain: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """Returns both, in bytes, for a recipe's configuration.

    The peak of all steps ("device_bytes"), and that of those after the first one
    ("later_bytes"), in which cuDNN tries no algorithms; None without a GPU.

    Args:
      plain: The configuration as dicts, with its mode and its choice of XLA.
      environment: Variables to set, such as cuDNN's limit of a workspace.
    """
    switches.set_environ(environment)  # TensorFlow reads them at the first convolution.
    config = config_dict.ConfigDict(plain)
    with trainer.enabled(config.precision):
        workload = workloads.from_config(config, _STEPS)
        batch = next(iter(workload.batches))
        computed = step_memory.memory(workload.model, batch)
        del batch
        steps = {"steps_per_epoch": 1, "shuffle": False, "verbose": 0}
        workload.model.fit(workload.batches, **steps)
        first = process_memory.peak_device(
            again=True
        )  # With the algorithms that it tried.
        workload.model.fit(workload.batches, **{**steps, "steps_per_epoch": _STEPS - 1})
        later = process_memory.peak_device()
        totals = computed.to_dict()
        totals.pop("layers")
        return {
            "computed": totals,
            "device_bytes": max(first or 0, later or 0),
            "later_bytes": later,
        }
