"""Models as users fine-tune them: with LoRA, with integers or float8 for weights.

    python tests/fine_tuning.py

prints the table of docs/fine_tuning.md: each model, base and mode is trained, saved,
loaded, compared and exported.
"""

import pathlib
import sys
import tempfile

import keras
import numpy as np

import tfamp

BASES = ("float32", "int8", "int4", "float8")
MODES = ("float32", "mixed_bfloat16", "mixed_float16")
STEPS, BATCH, LENGTH = 50, 16, 16


def mlp():
    """Returns a model, what it calls its inner one, and a batch for it."""
    features = np.random.default_rng(0).normal(size=(BATCH * 4, 32)).astype("float32")
    layers = [keras.layers.Dense(64, activation="gelu", name=f"d{i}") for i in (1, 2)]
    body = keras.Sequential([keras.Input((32,)), *layers], name="body")
    labels = features @ np.random.default_rng(1).normal(size=(32, 4))
    return body, body.inputs[0], lambda outputs: outputs, features, labels.argmax(-1)


def _backbone(kind, pooled, **arguments):
    """A KerasHub backbone with random weights; the first token is the label."""
    import keras_hub

    sizes = {"vocabulary_size": 300, "num_layers": 2, "num_heads": 4}
    sizes |= {"hidden_dim": 64, "intermediate_dim": 128, "max_sequence_length": LENGTH}
    body = getattr(keras_hub.models, kind)(**sizes, **arguments)
    ids = np.random.default_rng(0).integers(4, 300, (BATCH * 4, LENGTH))
    ids[:, 0] = np.arange(len(ids)) % 4
    batch = {name: ids if name == "token_ids" else ids * 0 for name in body.input}
    if "padding_mask" in batch:
        batch["padding_mask"] = ids * 0 + 1
    given = {name: keras.Input((LENGTH,), name=name, dtype="int32") for name in batch}
    return body, given, pooled, batch, ids[:, 0]


def bert():
    """BERT by KerasHub, 2 layers of 64."""
    return _backbone("BertBackbone", lambda found: found["pooled_output"])


def gpt2():
    """GPT-2 by KerasHub, 2 layers of 64."""
    return _backbone("GPT2Backbone", lambda found: found[:, 0])


MODELS = {"MLP": mlp, "BERT": bert, "GPT-2": gpt2}


def build(name, base="float32", lora=False):
    """Returns a classifier in float32, its batch and labels; quantized, with LoRA.

    Args:
      name: A key of `MODELS`.
      base: How its body stores weights: one of `BASES`.
      lora: Whether only low-rank factors of the body are trained.
    """
    keras.utils.set_random_seed(0)
    body, given, pooled, batch, labels = MODELS[name]()
    if base != "float32":
        body.quantize(base)
    if lora:
        enable_lora(body)
    head = keras.layers.Dense(4, name="head")(pooled(body(given)))
    return keras.Model(given, head, name="classifier"), batch, labels


def enable_lora(body):
    """KerasHub's backbones have it; of others, each layer is asked."""
    if hasattr(body, "enable_lora"):
        body.enable_lora(4)
        return
    body.trainable = False
    for layer in body.layers:
        layer.trainable = True
        layer.enable_lora(4)


def train(model, batch, labels, **arguments):
    """Compiles, and trains `STEPS` steps; returns the loss before and after."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, **arguments)
    before = model.evaluate(batch, labels, verbose=0)
    epochs = -(-STEPS * BATCH // len(labels))
    model.fit(batch, labels, BATCH, epochs, verbose=0, shuffle=False)
    return before, model.evaluate(batch, labels, verbose=0)


def prepare(name, base, lora, mode):
    """Returns `build`'s in a mode, under `enable`.

    float8 has the mode when it is quantized; integers are quantized in float32, since
    Keras refuses int8 in float16.
    """
    tfamp.disable()
    if base == "float8":
        tfamp.enable(mode)
        return build(name, base, lora)
    found = build(name, base, lora)
    tfamp.enable(mode)
    small = {"body.*|.*_backbone.*": "float8"} if mode == "float8" else None
    if mode != "float32":
        tfamp.set_precision(found[0], mode, small)
    return found


def load(path, mode):
    """Returns a saved model in a mode, under `enable`.

    KerasHub's files of int8 do not load in float16, by Keras: those are loaded first.
    """
    try:
        return keras.models.load_model(path, compile=False)
    except ValueError:
        tfamp.disable()
        loaded = keras.models.load_model(path, compile=False)
        tfamp.enable(mode)
        return tfamp.set_precision(loaded, mode)


def _cell(name, base, lora, mode, folder):
    """Returns a row of the table."""
    model, batch, labels = prepare(name, base, lora, mode)
    before, after = train(model, batch, labels, jit_compile=False)
    row = {"loss": f"{before:.3f} to {after:.4f}"}
    path = folder / "model.keras"
    for key, step in {
        "saved and loaded": lambda: _loaded(model, path, batch, mode),
        "exported": lambda: _exported(model, folder / "served", False),
        "as floats": lambda: _exported(model, folder / "floats", True),
        "error of 16 bits": lambda: _compared(model, batch, mode),
    }.items():
        try:
            row[key] = step()
        except Exception as error:
            row[key] = f"{type(error).__name__}: {error}".replace("\n", " ")[:90]
    return row


def _loaded(model, path, batch, mode):
    expected = model.predict(batch, verbose=0)
    model.save(path)
    found = load(path, mode).predict(batch, verbose=0)
    return f"{np.abs(found - expected).max() / np.abs(expected).max():.1e}"


def _exported(model, path, dequantize):
    report = tfamp.export(model, path, dequantize=dequantize, overwrite=True)
    return f"{max(row.relative for row in report.source_parity):.1e}"


def _compared(model, batch, mode):
    if mode == "float32":
        return "-"
    return f"{tfamp.compare_precision(model, batch).rows[-1].accumulated_error:.1e}"


def main():
    """Prints the table as Markdown."""
    header = None
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            for base in BASES:
                for lora in (False, True) if base != "float8" else (False,):
                    float8 = ("float8",) if base == "float32" and not lora else ()
                    for mode in (*MODES, *float8):
                        found = _cell(name, base, lora, mode, pathlib.Path(folder))
                        title = f"{base}, LoRA" if lora else base
                        row = {"model": name, "base": title, "mode": mode, **found}
                        if header is None:
                            header = [*row]
                            print(f"| {' | '.join(header)} |")
                            print(f"| {' | '.join('---' for _ in header)} |")
                        print(f"| {' | '.join(row.values())} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
