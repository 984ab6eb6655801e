"""Layers and their gradients on a device, beside the same in float64 on the CPU."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

from tfamp.precision import control
from tfamp.storage import codes

layers = keras.layers
MODES = "float32", "tf32", "mixed_bfloat16", "mixed_float16"
# Half a step of each format, relative: `numpy.finfo(...).eps / 2`, and TF32's 11 bits.
_ROUNDING = dict(zip(MODES, (2.0**-24, 2.0**-11, 2.0**-8, 2.0**-11), strict=True))
# An error over so many roundings is none of rounding alone: each of a layer's results
# goes through a few of them, whose errors add up.
_MANY = {"float32": 64, "tf32": 8, "mixed_bfloat16": 8, "mixed_float16": 8}


class _Attention(layers.Layer):
    """Causal attention of a sequence to itself."""

    def build(self, shape):
        self.heads = layers.MultiHeadAttention(
            4, shape[-1] // 4, dtype=self.dtype_policy
        )
        self.heads.build(shape, shape)

    def call(self, x):
        return self.heads(x, x, use_causal_mask=True)


def cases(tiny: bool) -> dict[str, Any]:
    """Returns {name: (function that makes a layer, shape of its input)}.

    Args:
      tiny: Whether sizes are those of a check.
    """
    rows, width, length = (64, 32, 32) if tiny else (8192, 512, 512)
    images = (2, 8, 8, 8) if tiny else (32, 32, 32, 64)
    tokens = (2, length, width) if tiny else (16, length, width)
    attention = functools.partial(_Attention, name="attention")
    wide = tokens if tiny else (2, 4096, 128)
    return {
        "dense": (lambda **k: layers.Dense(width, **k), (rows, width)),
        "dense with gelu": (
            lambda **k: layers.Dense(width, "gelu", **k),
            (rows, width),
        ),
        "einsum dense": (
            lambda **k: layers.EinsumDense(
                "abc,cde->abde", (None, 4, width // 4), bias_axes="de", **k
            ),
            tokens,
        ),
        "convolution": (lambda **k: layers.Conv2D(32, 3, padding="same", **k), images),
        "batch normalization": (layers.BatchNormalization, images),
        "layer normalization": (layers.LayerNormalization, tokens),
        "attention": (attention, tokens),
        "long attention": (attention, wide),
    }


def check(name: str, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yields the errors of a layer's results and gradients, for each mode.

    Args:
      name: A case of `cases`.
      tiny: As of `cases`.

    Yields:
      Plain data: name; mode; xla; error: the largest of ||x - exact|| / ||exact||, x
      being the output or a gradient; of: which; expected: what roundings explain.
    """
    make, shape = cases(tiny)[name]
    x = _numbers(1, shape, 0.0)
    with tf.device("CPU:0"):
        keras.utils.set_random_seed(0)
        layer = make(dtype="float64")
        layer.build(shape)
        weights = [w.astype("float32") for w in layer.get_weights()]
        exact = _results(layer, tf.constant(x), False)
    for mode, xla in itertools.product(MODES, (False, True)):
        result = {"name": name, "mode": mode, "xla": xla}
        try:
            errors = _errors(make, shape, weights, x, mode, xla, exact)
            # One that is NaN is above all others.
            worst = max(errors, key=lambda x: np.nan_to_num(errors[x], nan=np.inf))
            bound = _MANY[mode] * _ROUNDING[mode]
            result |= {"error": errors[worst], "of": worst, "expected": bound}
        except Exception as error:  # The next one may do.
            result["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        yield result


def _errors(make, shape, weights, x, mode, xla, exact):
    with control.enabled(mode, on_unsupported="warn", fused_kernels=True):
        keras.utils.set_random_seed(0)
        layer = make()
        layer.build(shape)
        layer.set_weights(weights)
        results = _results(layer, tf.constant(x, "float32"), xla)
    return {
        name: float(
            np.linalg.norm(results[name] - reference) / (np.linalg.norm(reference) or 1)
        )
        for name, reference in exact.items()
    }


def _results(layer, x, xla):
    """The output and all gradients, as float64."""
    names = [f"gradient of {v.path.split('/')[-1]}" for v in layer.trainable_variables]

    @tf.function(jit_compile=xla, autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.cast(layer(x, training=True), x.dtype)
            # With a mean: the errors of sums that cancel say nothing of a format.
            slopes = tf.constant(_numbers(2, y.shape, 1.0))
            loss = tf.reduce_sum(y * tf.cast(slopes, x.dtype))
        every = [x, *[v.value for v in layer.trainable_variables]]
        return y, tape.gradient(loss, every)

    y, (to_x, *rest) = step(x)
    return {
        "output": y.numpy().astype("float64"),
        "gradient of the input": to_x.numpy().astype("float64"),
        **{
            name: tf.convert_to_tensor(each).numpy().astype("float64")
            for name, each in zip(names, rest, strict=True)
        },
    }


def _numbers(seed, shape, mean):
    """Random numbers that all formats have, as float64."""
    drawn = np.random.default_rng(seed).normal(mean, size=shape)
    return drawn.astype(ml_dtypes.bfloat16).astype("float64")


def check_codes() -> Iterator[dict[str, Any]]:
    """Yields whether codes of 8 bits and bfloat16 have the same bits as on the CPU.

    Yields:
      Plain data as of `check`; the error is the number of tensors that differ.
    """
    x = np.random.default_rng(3).normal(size=5000).astype("float32")
    x[:6] = 0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30
    names = "SIGNED", "UNSIGNED", "BFLOAT16"
    for name, xla in itertools.product(names, (False, True)):
        code = getattr(codes, name)
        value = tf.abs(x) if name == "UNSIGNED" else tf.constant(x)

        @tf.function(jit_compile=xla, autograph=False)
        def both(x, code=code):
            packed = code.pack(x, tf.constant(7, tf.uint32))
            return *packed, code.read(*packed, x.shape)

        with tf.device("CPU:0"):
            reference = [
                each.numpy().tobytes()
                for each in tf.function(both.python_function)(value)
            ]
        result = [each.numpy().tobytes() for each in both(value)]
        same = sum(a == b for a, b in zip(reference, result, strict=True))
        yield {
            "name": f"codes {name}",
            "mode": "storage",
            "xla": xla,
            "error": float(len(reference) - same),
            "of": "tensors of other bits than on the CPU",
            "expected": 0.0,
        }
