"""One cell of `bert_vs_pytorch.py`, in a process of its own.

Reads its settings as JSON from the last argument and prints its figures as one line of
JSON. Imports only the framework it measures, so that it runs under PyTorch's own
interpreter, too.
"""

import contextlib
import functools
import json
import os
import pathlib
import sys
import time

import numpy as np

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


def peak_resident_mib():
    """Returns this process' peak resident memory; None where it is not told."""
    status = pathlib.Path("/proc/self/status")
    if not status.exists():
        return None
    (line,) = [x for x in status.read_text().splitlines() if x.startswith("VmHWM")]
    return round(int(line.split()[1]) / 1024)


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
        from tfamp import row_gradients

        row_gradients.install()
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

    peak = peak_resident_mib()
    if settings["device"] == "gpu":
        peak = tf.config.experimental.get_memory_info("GPU:0")["peak"] / 2**20
    skipped = getattr(model.optimizer, "skipped_steps", None)
    return {
        "peak_mib": None if peak is None else round(peak),
        "skipped_steps": None if skipped is None else int(skipped.numpy()),
        "tensor_float_32": tf.config.experimental.tensor_float_32_execution_enabled(),
        "versions": {"tensorflow": tf.__version__, "keras": keras.__version__},
    }


# ---- PyTorch ----

TORCH_DTYPES = {"mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}


def torch_step(settings):
    """As `keras_step`."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    gpu = settings["device"] == "gpu"
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(0)
    tf32 = settings["mode"] != "float32"
    torch.set_float32_matmul_precision("high" if tf32 and gpu else "highest")
    device = torch.device("cuda" if gpu else "cpu")
    model = torch_model(settings).to(device).train()
    optimizer = torch_optimizer(settings, model)
    scaler = torch.amp.GradScaler(
        device.type, enabled=settings["mode"] == "mixed_float16"
    )
    autocast = torch_autocast(settings, device)
    ids, labels = (torch.from_numpy(x).long() for x in batches(settings))
    ids, labels = ids.to(device), labels.to(device)
    steps = 0

    def step():
        nonlocal steps
        turn, steps = steps % BATCHES, steps + 1
        set_epsilon(optimizer, steps)
        optimizer.zero_grad(set_to_none=True)
        with autocast():
            logits = model(ids[turn])
        loss = torch.nn.functional.cross_entropy(logits.float(), labels[turn])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return step, functools.partial(torch_figures, settings)


def torch_autocast(settings, device):
    """Returns what makes the forward pass' context."""
    import torch

    name = TORCH_DTYPES.get(settings["mode"])
    if name is None:
        return contextlib.nullcontext
    return functools.partial(torch.autocast, device.type, dtype=getattr(torch, name))


def torch_model(settings):
    """Returns encoder, dropout and head in one module."""
    import torch
    import transformers

    class Classifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = transformers.BertModel.from_pretrained(
                settings["folder"],
                dtype=torch.float32,
                hidden_act=settings["activation"],
                hidden_dropout_prob=settings["dropout"],
                attention_probs_dropout_prob=settings["dropout"],
                attn_implementation=settings["torch_attention"],
            )
            self.dropout = torch.nn.Dropout(settings["dropout"])
            self.head = torch.nn.Linear(settings["hidden_dim"], CLASSES)
            with torch.no_grad():
                self.head.weight.copy_(torch.from_numpy(head_weights(settings).T))
                self.head.bias.zero_()

        def forward(self, ids):
            # A mask of ones and segments of 0, as Keras is given.
            outputs = self.encoder(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                token_type_ids=torch.zeros_like(ids),
            )
            return self.head(self.dropout(outputs.pooler_output))

    return Classifier()


def torch_optimizer(settings, model):
    """AdamW without decay on biases and normalization."""
    import torch

    if settings["optimizer"] == "sgd":
        return torch.optim.SGD(model.parameters(), LEARNING_RATE)
    kept = [p for n, p in model.named_parameters() if _is_kept(n)]
    others = [p for n, p in model.named_parameters() if not _is_kept(n)]
    groups = [{"params": others}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups,
        LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        eps=EPSILON,
        fused=settings["torch_fused"] or None,
    )


def set_epsilon(optimizer, step):
    """Sets Adam's epsilon to mean what Keras' means, which is added before the bias
    of the second moment is corrected.
    """
    for group in optimizer.param_groups:
        if "betas" in group:
            group["eps"] = EPSILON / (1 - group["betas"][1] ** step) ** 0.5


def _is_kept(name):
    return name.endswith("bias") or "LayerNorm" in name


def torch_figures(settings):
    """As `keras_figures`."""
    import torch
    import transformers

    peak = peak_resident_mib()
    if settings["device"] == "gpu":
        peak = round(torch.cuda.max_memory_allocated() / 2**20)
    return {
        "peak_mib": peak,
        "skipped_steps": None,
        "tensor_float_32": torch.get_float32_matmul_precision() != "highest",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


if __name__ == "__main__":
    main()
