"""What users do, each on the stand-in: whether it runs, and where, is seen; no values.

    python tests/gpu/stand_in.py tests/gpu/paths.py fits attention

Each function raises where its path does not run on a GPU. Prints {} at the end.
"""

import os
import pathlib
import sys
import tempfile

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import stand_in
import tensorflow as tf

import tfamp
from tfamp.serving import writing

layers = keras.layers
MODES = "float32", "tf32", "mixed_bfloat16", "mixed_float16"


def data(length=64, width=64):
    """Returns rows and classes."""
    x = np.zeros((length, width), "float32")
    return x, np.zeros(length, "int32")


def network(width=64):
    """Returns a classifier of rows with what the modes treat apart."""
    blocks = []
    for name in ("a", "b"):
        dense = layers.Dense(128, activation="gelu", name=name)
        blocks += [dense, layers.LayerNormalization(), layers.Dropout(0.1)]
    return keras.Sequential([keras.Input((width,)), *blocks, layers.Dense(4)])


def compiled(model, optimizer="adam", **options):
    """Compiles a classifier."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **options)
    return model


def train(model, x, y, batch=16, **options):
    """Trains and scores; there is a last batch of another size in neither."""
    model.fit(x, y, batch, verbose=0, **options)
    model.evaluate(x, y, batch, verbose=0)


def kinds(found):
    """Returns what was counted by its first word."""
    total = {}
    for what, times in found.items():
        kind = what.split()[0]
        total[kind] = total.get(kind, 0) + times
    return total


def fits(xla=False):
    """`enable`, `fit`, `evaluate` and `predict` in every mode."""
    for mode in MODES:
        status = tfamp.enable(mode)
        assert status.requested == status.effective == mode, status
        model = compiled(network(), jit_compile=xla)
        stand_in.reset()
        train(model, *data())
        assert model.predict(data()[0], verbose=0).shape == (64, 4)
        found = kinds(stand_in.counts())
        # Without XLA as a whole, graphs are programs of small operators.
        graphs = xla or mode != "float32"
        assert found["kernel"] and bool(found.get("graph")) == graphs, found
        assert hasattr(model.optimizer, "initial_scale") == (mode == "mixed_float16")
        tfamp.disable()
    assert keras.config.dtype_policy().name == "float32"


def fits_xla():
    """The same under XLA."""
    fits(xla=True)


def keras_choice():
    """Keras chooses XLA by itself on a host with a GPU."""
    tfamp.enable("mixed_bfloat16")
    model = compiled(network())
    stand_in.reset()
    train(model, *data())
    assert model.jit_compile and kinds(stand_in.counts())["graph"]


def attention():
    """Attention in linear memory, with dropout, and no copy to the host for a block."""
    copies = []
    for length in (1024, 2048):
        tfamp.enable("mixed_bfloat16")
        inputs = keras.Input((length, 32))
        heads = layers.MultiHeadAttention(2, 16, dropout=0.1)
        x = heads(inputs, inputs, use_causal_mask=True)
        model = keras.Model(inputs, layers.Dense(4)(layers.GlobalMaxPool1D()(x)))
        compiled(model, jit_compile=False)
        x = np.zeros((4, length, 32), "float32")
        train(model, x, np.zeros(4, "int32"), 2)
        stand_in.reset()
        train(model, x, np.zeros(4, "int32"), 2)
        copies.append(stand_in.counts()["copy DtoH"])
        tfamp.disable()
    assert copies[0] == copies[1], copies


def savings():
    """Rematerialization, slots and weights in fewer bits, accumulation of gradients."""
    for options in (
        {"remat": [".*/(a|b)"]},
        {"optimizer_state": "8bit"},
        {"optimizer_state": "bfloat16"},
        {"weights": "bfloat16"},
    ):
        tfamp.enable("mixed_bfloat16", **options)
        train(compiled(network(512), jit_compile=False), *data(width=512))
        tfamp.disable()
    for mode in ("mixed_bfloat16", "mixed_float16"):
        tfamp.enable(mode)
        optimizer = keras.optimizers.AdamW(1e-3, gradient_accumulation_steps=2)
        train(compiled(network(), optimizer, jit_compile=False), *data())
        tfamp.disable()


def rewrite():
    """The graph rewrite, which converts nodes for a GPU, and says so."""
    tfamp.enable("mixed_float16", graph_rewrite=True)
    train(compiled(network(), jit_compile=False), *data())
    text = tfamp.status().full()
    assert "converted" in text, text


def serves():
    """Exports in float32 and in the mode, which load; values are not compared."""
    writing.check_float32 = lambda served: None
    tfamp.enable("mixed_float16")
    model = compiled(network(), jit_compile=False)
    train(model, *data())
    with tempfile.TemporaryDirectory() as folder:
        for name in ("float32", "mixed_float16"):
            path = pathlib.Path(folder, name)
            tfamp.export(model, path, precision=name)
            served = tf.saved_model.load(path)
            assert served.serve(tf.zeros((3, 64))).shape == (3, 4)


def diagnostics():
    """A strategy with one GPU, monitors, memory and audit."""
    tfamp.enable("mixed_float16")
    with tf.distribute.OneDeviceStrategy("GPU:0").scope():
        model = compiled(network(), jit_compile=False)
    train(model, *data(), callbacks=[tfamp.LossScaleMonitor()])
    model = compiled(network())
    assert tfamp.audit(model) and tfamp.memory(model, data(8))


if __name__ == "__main__":
    for each in sys.argv[1:]:
        globals()[each]()
        print(f"{each}: done", file=sys.stderr, flush=True)
    print("{}")
