r"""Single layers and whole models in 16 bits beside float32: which are slower?

    python benchmarks/layers.py --output=results/layers

A layer's training step (its gradients by inputs and weights) is timed three ways: in
float32; in 16 bits; and in float32 with 16-bit layers before and after it, which is
what keeping it in float32 in a mixed model costs. Models take a step of `fit`: in
float32, under `enable(mode)`, and with every layer in the mode. Rounds are interleaved;
medians of their ratios and the quartiles. Nothing else should run: about 8 minutes on
two cores.
"""

import functools
import itertools
import json
import pathlib
import time

import environment
import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

FLAGS = flags.FLAGS
flags.DEFINE_string("mode", "mixed_bfloat16", "A mixed mode.")
flags.DEFINE_integer("rounds", 15, "Timed rounds.", lower_bound=3)
flags.DEFINE_string("only", "", "Rows whose name holds this.")
flags.DEFINE_string("output", "", "Folder for layers.json and report.md.")

SECONDS = 0.05  # Of a row's round, about.


def image(side, channels, batch=16):
    """Returns the shape of a batch of images."""
    return batch, side, side, channels


def layer_rows():
    """Yields (name, class, keywords, shape of the inputs)."""
    kinds = keras.layers
    for strides, padding in itertools.product((1, 2), ("same", "valid")):
        for shape in (image(56, 64), image(14, 384)):
            name = f"DepthwiseConv2D strides={strides} {padding}"
            keywords = {"kernel_size": 3, "strides": strides, "padding": padding}
            yield name, kinds.DepthwiseConv2D, keywords, shape
    square = {"kernel_size": 3, "padding": "same"}
    dilated = {**square, "dilation_rate": 2}
    yield "DepthwiseConv2D dilated", kinds.DepthwiseConv2D, dilated, image(28, 128)
    wide = {**square, "kernel_size": 5}
    yield "DepthwiseConv2D 5x5", kinds.DepthwiseConv2D, wide, image(28, 128)
    for strides in (1, 2):
        several = {**square, "strides": strides}
        yield (
            f"DepthwiseConv1D strides={strides}",
            *(kinds.DepthwiseConv1D, several, (32, 128, 256)),
        )
        yield (
            f"SeparableConv2D strides={strides}",
            *(kinds.SeparableConv2D, {"filters": 128, **several}, image(28, 128)),
        )
        yield (
            f"Conv2D strides={strides}",
            *(kinds.Conv2D, {"filters": 64, **several}, image(28, 64)),
        )
        yield (
            f"Conv2DTranspose strides={strides}",
            *(kinds.Conv2DTranspose, {"filters": 32, **several}, image(28, 64)),
        )
    yield (
        "Conv1D",
        *(kinds.Conv1D, {"filters": 128, **square}, (32, 128, 128)),
    )
    for kind, units in itertools.product(
        (kinds.GRU, kinds.LSTM, kinds.SimpleRNN), (16, 32, 64, 128, 256)
    ):
        yield f"{kind.__name__}({units})", kind, {"units": units}, (32, 50, units)
    for kind in (kinds.MaxPooling2D, kinds.AveragePooling2D):
        yield f"{kind.__name__} 2", kind, {"pool_size": 2}, image(56, 64)
        several = {"pool_size": 3, "strides": 2, "padding": "same"}
        yield f"{kind.__name__} 3, strides=2", kind, several, image(56, 64)
    average = kinds.GlobalAveragePooling2D
    yield "GlobalAveragePooling2D", average, {}, image(56, 64)
    yield "BatchNormalization", kinds.BatchNormalization, {}, image(56, 64)
    yield "LayerNormalization", kinds.LayerNormalization, {}, (16, 128, 768)
    yield (
        "GroupNormalization",
        *(kinds.GroupNormalization, {"groups": 8}, image(28, 64)),
    )
    for how in ("nearest", "bilinear"):
        keywords = {"size": 2, "interpolation": how}
        yield f"UpSampling2D {how}", kinds.UpSampling2D, keywords, image(28, 64)
    yield "Dense(768)", kinds.Dense, {"units": 768}, (512, 768)
    yield "Dense(64)", kinds.Dense, {"units": 64}, (32, 64)


def layer_steps(kind, keywords, shape):
    """Returns {"float32", "16 bits", "kept in float32": step}."""
    x = tf.constant(np.random.default_rng(0).normal(size=shape).astype("float32"))
    low = keras.dtype_policies.get(FLAGS.mode).compute_dtype

    def step(dtype, dtype_around):
        layer = kind(**keywords, dtype=dtype)
        inputs = tf.cast(x, dtype_around)
        weights = tf.cast(
            np.random.default_rng(1).normal(size=layer(inputs).shape), dtype_around
        )

        @tf.function
        def run(inputs, weights):
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                outputs = tf.cast(layer(inputs, training=True), dtype_around)
            sources = [inputs, *layer.trainable_variables]
            return tape.gradient(outputs, sources, output_gradients=weights)

        return functools.partial(run, inputs, weights)

    return {
        "float32": step("float32", "float32"),
        "16 bits": step(FLAGS.mode, low),
        "kept in float32": step("float32", low),
    }


def sequence_classifier():
    """A small GRU classifier of sentences."""
    kinds = keras.layers
    body = [kinds.Embedding(5000, 32), kinds.GRU(32), kinds.Dense(2, "softmax")]
    return keras.Sequential([keras.Input((50,), dtype="int32"), *body])


def transformer():
    """Two encoder layers of width 256 over 64 tokens."""
    kinds = keras.layers
    inputs = keras.Input((64,), dtype="int32")
    x = kinds.Embedding(5000, 256)(inputs)
    for _ in range(2):
        attended = kinds.MultiHeadAttention(4, 64)(x, x)
        x = kinds.LayerNormalization()(kinds.Add()([x, attended]))
        inner = kinds.Dense(256)(kinds.Dense(1024, "gelu")(x))
        x = kinds.LayerNormalization()(kinds.Add()([x, inner]))
    x = kinds.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, kinds.Dense(2, "softmax")(x))


def perceptron():
    """Four dense layers of width 1024."""
    kinds = [keras.layers.Dense(1024, "relu") for _ in range(4)]
    body = [keras.Input((1024,)), *kinds, keras.layers.Dense(10, "softmax")]
    return keras.Sequential(body)


def application(name, side):
    """A model of `keras.applications`, of ten classes and random weights."""
    make = getattr(keras.applications, name)
    return make(weights=None, input_shape=(side, side, 3), classes=10)


MODELS = {
    "MobileNetV2, 96 px": (lambda: application("MobileNetV2", 96), image(96, 3)),
    "EfficientNetB0, 96 px": (lambda: application("EfficientNetB0", 96), image(96, 3)),
    "GRU classifier": (sequence_classifier, (32, 50)),
    "transformer": (transformer, (32, 64)),
    "MLP": (perceptron, (256, 1024)),
}


def model_steps(build, shape):
    """Returns {mode: step of `fit`}; a GRU's and a transformer's inputs are ids."""
    random = np.random.default_rng(0)
    ids = len(shape) == 2 and shape[1] < 100
    x = random.integers(0, 5000, shape) if ids else random.normal(size=shape)
    y = random.integers(0, 2, shape[0])
    modes = {
        "float32": ("float32", None),
        "16 bits": (FLAGS.mode, {".*": FLAGS.mode}),
        "kept in float32": (FLAGS.mode, None),
    }
    steps = {}
    for name, (mode, overrides) in modes.items():
        keras.utils.set_random_seed(0)
        with tfamp_enabled(mode, overrides):
            model = build()
            model.compile("adam", "sparse_categorical_crossentropy", jit_compile=False)
            data = tf.constant(x.astype("int32" if ids else "float32")), tf.constant(y)
            model.train_on_batch(*data)
        steps[name] = functools.partial(model.train_on_batch, *data)
    return steps


def tfamp_enabled(mode, overrides):
    """Scopes `enable`."""
    from tfamp.precision import control

    return control.enabled(mode, overrides=overrides)


def time_rows(steps):
    """Returns {name: seconds of each round}, interleaved."""
    for step in steps.values():
        step()
        step()
    start = time.perf_counter()
    _wait(steps["float32"]())
    calls = max(1, int(SECONDS / max(time.perf_counter() - start, 1e-5)))
    times = {name: [] for name in steps}
    for _ in range(FLAGS.rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(calls):
                result = step()
            _wait(result)
            times[name].append((time.perf_counter() - start) / calls)
    return {name: np.array(each) for name, each in times.items()}


def _wait(result):
    for each in tf.nest.flatten(result, expand_composites=True):
        if isinstance(each, tf.Tensor):
            each.numpy()


def main(_):
    """Prints a table, and writes it."""
    logging.set_verbosity(logging.ERROR)
    rows = []
    cases = [
        (name, functools.partial(layer_steps, kind, keywords, shape), shape)
        for name, kind, keywords, shape in layer_rows()
    ]
    cases += [
        (name, functools.partial(model_steps, *both), both[1])
        for name, both in MODELS.items()
    ]
    lines = [
        "| layer or model | inputs | float32, ms | 16 bits / float32 | quartiles "
        "| kept in float32 / float32 | quartiles |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for name, make, shape in cases:
        if FLAGS.only not in name:
            continue
        with tfamp_enabled(FLAGS.mode, None):
            times = time_rows(make())
        keras.backend.clear_session()
        cells = [f"{np.median(times['float32']) * 1e3:.2f}"]
        row = {"name": name, "shape": shape}
        row |= {key: each.tolist() for key, each in times.items()}
        for key in ("16 bits", "kept in float32"):
            ratios = times[key] / times["float32"]
            low, middle, high = np.percentile(ratios, [25, 50, 75])
            cells += [f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
        rows.append(row)
        inputs = "x".join(map(str, shape))
        lines.append(f"| {name} | {inputs} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if FLAGS.output:
        folder = pathlib.Path(FLAGS.output)
        folder.mkdir(parents=True, exist_ok=True)
        found = {
            "environment": environment.describe("python benchmarks/layers.py"),
            "mode": FLAGS.mode,
        }
        text = json.dumps({**found, "rows": rows}, indent=1)
        (folder / "layers.json").write_text(text + "\n")
        (folder / "table.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    app.run(main)
