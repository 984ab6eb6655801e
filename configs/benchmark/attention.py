"""Attention alone: its memory and time as the length doubles, beside Keras'.

    python scripts/benchmark.py --config=configs/benchmark/attention.py

`keras mixed_bfloat16` is Keras', which keeps all scores. In `float32_*` the layer is in
float32, in a mode in which tfamp's attention runs.
"""

import pathlib

from tfamp.benchmark import cells

MODELS = pathlib.Path(__file__).with_name("models.py")


def get_config():
    """Returns the configuration."""
    config = cells.get_config()
    config.name = "attention"
    config.steps, config.warmup = 3, 1
    for dtype in ("float32", "bfloat16"):
        for causal in (False, True):
            name = f"{dtype}_{'causal' if causal else 'full'}"
            task = cells.get_task(f"{MODELS}:attention", causal=causal, dtype=dtype)
            task.modes = ("mixed_bfloat16",)
            task.sequence_lengths = (1024, 2048, 4096, 8192)
            config.tasks[name] = task
    return config
