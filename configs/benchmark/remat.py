"""What computing blocks again saves, and costs: twelve transformer layers.

    python scripts/benchmark.py --config=configs/benchmark/remat.py

Memory of a step beside that of one with a single example, which is what weights, slots
and compiled code take: the rest are activations. As a graph and compiled by XLA.
"""

import pathlib

from tfamp.benchmark import cells

MODELS = pathlib.Path(__file__).with_name("models.py")


def get_config():
    """Returns the configuration."""
    config = cells.get_config()
    config.name = "remat"
    config.steps, config.warmup = 5, 2
    made = {
        "kept": {"remat": False},
        "again": {"remat": True},
        "one": {"remat": False, "batch_size": 1},
    }
    for name, arguments in made.items():
        task = cells.get_task(f"{MODELS}:blocks", **arguments)
        task.modes, task.frameworks = ("float32",), ("tfamp",)
        task.jit, task.beside = ("off", "on"), "kept"
        config.tasks[name] = task
    return config
