"""Single layers in float32, TF32 where there is, and in 16 bits: which are slower?

    python scripts/benchmark.py --config=configs/benchmark/layers.py

`keras mixed_bfloat16` computes every layer in bfloat16; tfamp's keeps in float32 those
that are slower so on this device (`tfamp.status().float32_layers`).
"""

import pathlib

from tfamp import functions
from tfamp.benchmark import cells

MODELS = pathlib.Path(__file__).with_name("models.py")


def get_config():
    """Returns the configuration."""
    config = cells.get_config()
    config.name = "layers"
    for name in functions.find(f"{MODELS}:LAYERS"):
        config.tasks[name] = cells.get_task(f"{MODELS}:layer", name=name)
    return config
