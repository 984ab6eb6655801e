"""The dtype policy and the graph rewrite side by side, with and without XLA.

python scripts/benchmark.py --config=configs/benchmark/rewrite.py
"""

import pathlib

from tfamp.benchmark import cells

MODELS = pathlib.Path(__file__).with_name("models.py")


def get_config():
    """Returns the configuration."""
    config = cells.get_config()
    config.name = "rewrite"
    config.steps, config.warmup = 15, 5
    for name in ("mlp", "conv", "transformer"):
        task = cells.get_task(f"{MODELS}:{name}")
        task.modes = ("float32", "mixed_bfloat16", "rewrite_bfloat16")
        task.jit = ("off", "on")
        config.tasks[name] = task
    return config
