"""What loss scaling costs: stock Keras' and tfamp's beside the plain optimizer.

    python scripts/benchmark.py --config=configs/benchmark/loss_scale.py

Of the update alone (25 million parameters in 128 variables, given gradients) and of a
whole step, in float32, as a graph and compiled by XLA. Speed-ups are over the plain
optimizer traced the same way: a cost of 1.25 is one of 0.80x.
"""

import itertools
import pathlib

from tfamp.benchmark import cells

MODELS = pathlib.Path(__file__).with_name("models.py")


def get_config():
    """Returns the configuration."""
    config = cells.get_config()
    config.name = "loss_scale"
    config.steps, config.warmup = 30, 5
    wrappers = ("none", "keras", "tfamp")  # First the base of the others.
    for what, optimizer in itertools.product(("update", "step"), ("sgd", "adam")):
        for scaling in wrappers:
            made = {"optimizer": optimizer, "scaling": scaling}
            task = cells.get_task(f"{MODELS}:{what}", **made)
            task.modes, task.frameworks = ("float32",), ("tfamp",)
            task.jit = ("off", "on")
            task.beside = f"{what}_{optimizer}_none"
            config.tasks[f"{what}_{optimizer}_{scaling}"] = task
    return config
