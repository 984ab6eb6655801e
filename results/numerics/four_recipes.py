"""Where four recipes lose precision, and what must stay in float32: pages of record.

    python results/numerics/four_recipes.py NAME MODE SHARED_DATA

NAME is bert, resnet, unet or lm; SHARED_DATA has `tweets/` and `dsb2018_256/` as
configs/bert/tweets.py and configs/unet/dsb2018.py describe them. Each model first
trains for 60 steps in float32: its gradients are no longer those of a new model.
"""

import importlib.util
import pathlib
import sys
import time

import keras

import tfamp
from tfamp.runs import tasks

RECIPES = {
    "bert": ("configs/bert/tweets.py", "tiny", "tweets"),
    "resnet": ("configs/cnn/cifar10_resnet_tiny.py", None, None),
    "unet": ("configs/unet/dsb2018.py", None, "dsb2018_256"),
    "lm": ("configs/lm/docstrings.py", None, None),
}


def load(name, root):
    """Returns a recipe's model, trained a little, and batches of (inputs, targets)."""
    path, variant, folder = RECIPES[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(variant) if variant else module.get_config()
    if name == "resnet":  # CIFAR-10 could not be downloaded: digits of scikit-learn.
        config.data.name, config.data.image_size = "digits", 32
    config.data_dir = str(pathlib.Path(root, folder)) if folder else ""
    keras.utils.set_random_seed(0)
    task = tasks.from_config(config)
    model = task.build_model()
    size = min(config.batch_size, 32)
    batches = task.train.shuffle(4096, seed=0).batch(size, drop_remainder=True)
    if name == "unet":  # Crops, as the recipe trains on.
        batches = batches.map(lambda x, y: (x[:, :128, :128], y[:, :128, :128]))
    model.compile(keras.optimizers.Adam(1e-3), task.loss)
    model.fit(batches.repeat(), steps_per_epoch=60, verbose=2)
    return model, [*batches.take(8)]


def main(name, mode, root):
    """Writes NAME_MODE.md and the figures beside this file."""
    model, batches = load(name, root)
    x, y = batches[0]
    scale = {"loss_scale": 2.0**15} if mode == "mixed_float16" else {}
    start = time.perf_counter()
    found = tfamp.compare_precision(model, x, mode, targets=y, **scale)
    middle = time.perf_counter()
    search = tfamp.search_precision(model, batches, mode, **scale)
    end = time.perf_counter()
    stem = pathlib.Path(__file__).with_name(f"{name}_{mode.removeprefix('mixed_')}")
    stem.with_suffix(".md").write_text(
        f"{found.to_markdown()}\n{search.to_markdown()}\n"
        f"compare_precision took {middle - start:.0f} s, "
        f"search_precision {end - middle:.0f} s.\n"
    )
    search.figure().savefig(stem.with_suffix(".png"), dpi=100)
    worst = max(found.rows, key=lambda row: row.local_error)
    gradient = max(found.rows, key=lambda row: row.local_gradient_error or 0.0)
    print(name, mode, "largest local error", worst.name, f"{worst.local_error:.2e}")
    print("of gradients", gradient.name, f"{gradient.local_gradient_error:.2e}")
    print(search)


if __name__ == "__main__":
    main(*sys.argv[1:])
