"""What slots of 8 bits or bfloat16, and weights of bfloat16, cost and save.

    python scripts/benchmark.py --config=configs/benchmark/states.py

Steps of the encoder of `bert.py`, 22.6 million parameters, without XLA and with it.
Half an hour on a core.
"""

from tfamp.benchmark import cells, workloads


def get_config():
    """Returns the configuration."""
    config = workloads.load("bert.py", __file__)
    config.name = "states"
    config.steps, config.warmup = 8, 2
    encoder = config.tasks.bert.config
    del config.tasks.bert
    ways = {
        "slots_float32": ("float32", "float32"),
        "slots_bfloat16": ("bfloat16", "float32"),
        "slots_8bit": ("8bit", "float32"),
        "slots_8bit_weights_bfloat16": ("8bit", "bfloat16"),
    }
    for name, (state, weights) in ways.items():
        own = encoder.copy_and_resolve_references()
        own.precision.optimizer_state, own.precision.weights = state, weights
        task = cells.get_task(own)
        task.modes = ("mixed_bfloat16",)
        task.frameworks, task.jit = ("tfamp",), ("off", "on")
        task.beside = "slots_float32"
        config.tasks[name] = task
    config.tasks.slots_float32.modes = ("float32", "mixed_bfloat16")
    return config
