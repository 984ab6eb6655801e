"""The peak of TensorFlow's allocator beside what `memory` computes."""

import os
from typing import Any

import tensorflow as tf
from ml_collections import config_dict

from tfamp.measuring import processes, workloads
from tfamp.runs import trainer
from tfamp.storage import account

_STEPS = 4


def measure(plain: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """Returns both, in bytes, for a recipe's configuration.

    Args:
      plain: The configuration as dicts, with its mode and its choice of XLA.
      environment: Variables to set, such as cuDNN's limit of a workspace.
    """
    os.environ.update(environment)  # TensorFlow reads them at the first convolution.
    config = config_dict.ConfigDict(plain)
    with trainer.enabled(config.precision):
        made = workloads.from_config(config, _STEPS)
        batch = next(iter(made.batches))
        computed = account.memory(made.model, batch)
        if tf.config.list_physical_devices("GPU"):
            del batch
            tf.config.experimental.reset_memory_stats("GPU:0")
        made.model.fit(made.batches, steps_per_epoch=_STEPS, shuffle=False, verbose=0)
        found = computed.to_dict()
        found.pop("layers")
        return {"computed": found, "device_bytes": processes.peak_device()}
