"""One cell of `bert_vs_pytorch.py`, in a process of its own.

Reads its settings as JSON from the last argument and prints its figures as one line of
JSON. Imports only the framework it measures, so that it runs under PyTorch's own
interpreter, too; there it trains as the benchmark's `torch_cell` does.
"""

import functools
import json
import os
import pathlib
import sys
import time

import numpy as np

TORCH_CELL = pathlib.Path(__file__).parents[1] / "tfamp/benchmark"
BATCHES = 4  # Different ones; the steps take turns.
PARITY_STEPS = 4
LEARNING_RATE, WEIGHT_DECAY, CLIP_NORM, EPSILON = 5e-5, 0.01, 1.0, 1e-7
CLASSES = 2


def main():
    """Measures the cell."""
    settings = json.loads(sys.argv[-1])
    torch_cell = settings["framework"] == "torch"
    step, finish = (torch_step if torch_cell else keras_step)(settings)
    losses = [step() for _ in range(PARITY_STEPS)]
    figures = {"losses": losses}
    if settings["job"] == "speed":
        for _ in range(settings["warmup"]):
            step()
        figures["seconds"] = [timed(step) for _ in range(settings["steps"])]
    print(json.dumps(figures | finish()))


def timed(step):
    """Returns the seconds of a step; reading the loss waits for the device."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def batches(settings):
    """Returns token ids [BATCHES, batch, length], without padding, and labels."""
    random = np.random.default_rng(0)
    shape = BATCHES, settings["batch_size"], settings["length"]
    ids = random.integers(1000, settings["vocabulary_size"], shape, "int32")
    return ids, random.integers(0, CLASSES, shape[:2], "int32")


def head_weights(settings):
    """Returns the kernel of the classifier [hidden, CLASSES]."""
    shape = settings["hidden_dim"], CLASSES
    return np.random.default_rng(1).normal(0, 0.02, shape).astype("float32")


# ---- Keras, with and without tfamp ----


def keras_step(settings):
    """Returns a function that trains one step, and one that tells what it cost."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(settings["threads"])
    if settings["device"] == "cpu":
        tf.config.set_visible_devices([], "GPU")
    elif not tf.config.list_physical_devices("GPU"):
        raise RuntimeError("TensorFlow finds no GPU")
    keras.utils.set_random_seed(0)
    set_keras_mode(settings)
    model = keras_model(settings)
    model.compile(
        keras_optimizer(settings),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=settings["xla"],
    )
    # What `fit` runs for each step.
    model.make_train_function()
    iterator = iter(keras_dataset(settings))

    def step():
        model.reset_metrics()  # The loss that is returned is a mean since then.
        return float(model.train_function(iterator)["loss"])

    return step, functools.partial(keras_figures, settings, model)


def set_keras_mode(settings):
    """By hand, as plain Keras' users do, or by `tfamp.enable`."""
    import keras
    import tensorflow as tf

    mode = settings["mode"]
    if settings["framework"] == "tfamp":
        import tfamp

        tfamp.enable(mode)
        return
    tf.config.experimental.enable_tensor_float_32_execution(mode != "float32")
    keras.config.set_dtype_policy("float32" if mode == "tf32" else mode)


def keras_model(settings):
    """Returns encoder, dropout and head, with the weights that PyTorch has."""
    import keras

    from tfamp.training import pretrained

    preset = pretrained.find(settings["folder"])
    preset = preset._replace(activation=settings["activation"])
    backbone = pretrained.build_backbone(preset, settings["dropout"])
    x = keras.layers.Dropout(settings["dropout"])(backbone.output["pooled_output"])
    head = keras.layers.Dense(CLASSES, dtype="float32", name="logits")
    model = keras.Model(backbone.input, head(x))
    head.kernel.assign(head_weights(settings))
    return model


def keras_optimizer(settings):
    """The stock one; Keras wraps it for float16, or tfamp does."""
    import keras

    if settings["optimizer"] == "sgd":
        return keras.optimizers.SGD(LEARNING_RATE, global_clipnorm=CLIP_NORM)
    optimizer = keras.optimizers.AdamW(
        LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        epsilon=EPSILON,
        global_clipnorm=CLIP_NORM,
    )
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    if settings["sum_rows"]:
        from tfamp.kernels import bias_gradient

        bias_gradient.HOOKS.install()
    return optimizer


def keras_dataset(settings):
    """Returns an endless dataset of the batches."""
    import tensorflow as tf

    ids, labels = batches(settings)
    features = {
        "token_ids": ids,
        "segment_ids": np.zeros_like(ids),
        "padding_mask": np.ones_like(ids),
    }
    dataset = tf.data.Dataset.from_tensor_slices((features, labels))
    return dataset.repeat().prefetch(2)


def keras_figures(settings, model):
    """Returns peak memory in MiB, versions, and what was skipped."""
    import keras
    import tensorflow as tf

    from tfamp.training import memory_limit

    peak = memory_limit.peak_host()
    if settings["device"] == "gpu":
        peak = memory_limit.peak_device()
    skipped = getattr(model.optimizer, "skipped_steps", None)
    return {
        "peak_mib": None if peak is None else round(peak / 2**20),
        "skipped_steps": None if skipped is None else int(skipped.numpy()),
        "tensor_float_32": tf.config.experimental.tensor_float_32_execution_enabled(),
        "versions": {"tensorflow": tf.__version__, "keras": keras.__version__},
    }


# ---- PyTorch ----


def torch_step(settings):
    """As `keras_step`."""
    import torch
    import transformers

    sys.path.append(str(TORCH_CELL))
    import torch_training

    transformers.utils.logging.disable_progress_bar()
    device = torch.device("cuda" if settings["device"] == "gpu" else "cpu")
    mode = settings["mode"]
    tf32 = torch_training.configure(device, mode, settings["threads"], seed=0)
    network = torch_network(settings).to(device).train()
    trainer = torch_training.Trainer(
        *(network, mode, torch_optimizer(settings)),
        loss_scale={},  # PyTorch's own defaults.
        fused=settings["torch_fused"],
    )
    ids, labels = (torch.from_numpy(x).long().to(device) for x in batches(settings))
    segments, mask = torch.zeros_like(ids[0]), torch.ones_like(ids[0])  # As in Keras.

    def step():
        turn = trainer.steps % BATCHES
        loss, _ = trainer.step((ids[turn], segments, mask), labels[turn])
        return loss

    return step, functools.partial(torch_figures, trainer, device, tf32)


def torch_network(settings):
    """Returns encoder, dropout and head in one module."""
    import torch
    import torch_networks
    import transformers

    dropout = settings["dropout"]
    encoder = transformers.BertModel.from_pretrained(
        settings["folder"],
        dtype=torch.float32,
        hidden_act=settings["activation"],
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation=settings["torch_attention"],
    )
    network = torch_networks.TextClassifier(encoder, "cls", dropout, CLASSES)
    with torch.no_grad():
        network.logits.weight.copy_(torch.from_numpy(head_weights(settings).T))
        network.logits.bias.zero_()
    return network


def torch_optimizer(settings):
    """Returns the optimizer's numbers, as `keras_optimizer` has them."""
    adamw = settings["optimizer"] == "adamw"
    steps = PARITY_STEPS + settings["warmup"] + settings["steps"]
    return {
        "name": settings["optimizer"],
        "learning_rates": [LEARNING_RATE] * steps,
        "epsilon": EPSILON,
        "weight_decay": WEIGHT_DECAY if adamw else 0.0,
        "momentum": 0.0,
        "nesterov": False,
        "clip_global_norm": CLIP_NORM,
    }


def torch_figures(trainer, device, tf32):
    """As `keras_figures`."""
    import torch_cell

    found = torch_cell.facts(device)
    peak = found["device_bytes"] or found["host_bytes"]
    return {
        "peak_mib": None if peak is None else round(peak / 2**20),
        "skipped_steps": trainer.skipped if trainer.scaler.is_enabled() else None,
        "tensor_float_32": tf32,
        "versions": found["versions"],
    }


if __name__ == "__main__":
    main()
