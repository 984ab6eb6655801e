"""Export in 16 bits, with 16-bit weights, and as LiteRT: verified beside float32."""

import json
import os
import warnings
from typing import Any

import helpers
import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import tfamp

BF16, F16 = "mixed_bfloat16", "mixed_float16"
STORED = {"float32": "float16", BF16: "bfloat16", F16: "float16"}
HAS_LITERT = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 13)


def epsilon(precision):
    return tfamp.float_format(STORED[precision]).epsilon


@pytest.fixture
def target(tmp_path):
    return tmp_path / "exported"


def built(build, mode="float32"):
    with tfamp.policy_scope(mode):
        return build()


def reloaded(path):
    return tf.saved_model.load(str(path)).signatures["serving_default"]


def words():
    text = keras.Input((), dtype="string", name="text")
    ids = L.TextVectorization(vocabulary=["a", "b"], output_sequence_length=3)(text)
    x = L.Dense(4)(L.Flatten()(L.Embedding(5, 4)(ids)))
    return keras.Model(text, L.Dense(2)(x))


class Classes(keras.Model):
    """Returns floats and integers; Keras knows nothing of its inputs."""

    def __init__(self):
        super().__init__()
        self.table, self.body, self.head = L.Embedding(9, 8), L.Dense(8), L.Dense(3)

    def call(self, inputs):
        x = self.head(self.body(self.table(inputs["ids"])))
        return {"logits": x, "class": keras.ops.argmax(x, axis=-1)}


# ---- What is exported ----

CASES = [  # A model, the mode it is built in, the precision of its export.
    *(("convolutions", "float32", precision) for precision in ("float32", BF16)),
    pytest.param("convolutions", "float32", F16, marks=pytest.mark.device),
    *(("tokens", BF16, F16), ("subclassed", F16, BF16), ("LoRA", "float32", F16)),
    *(("tf.function", BF16, "float32"), ("per-layer dtypes", F16, BF16)),
]


@pytest.mark.parametrize(("name", "mode", "precision"), CASES)
@pytest.mark.parametrize("half", [False, True])
def test_served_model_computes_in_the_format(name, mode, precision, half, target):
    model = built((models.MODELS | models.FIXED)[name], mode)
    before = models.described(model)
    report = tfamp.export(model, target, precision, half_weights=half)
    assert models.described(model) == before
    assert os.listdir(target.parent) == ["exported"]
    low = precision.removeprefix("mixed_")
    assert report.products[low] >= 1 and set(report.products) <= {low, "float32"}
    dtypes = {tensor.dtype for tensor in reloaded(target).structured_outputs.values()}
    assert dtypes == {tf.float32}
    assert max(row.relative for row in report.parity) < 8 * epsilon(precision)
    costs = [row.relative for row in report.weights_parity]
    assert bool(costs) == half and (STORED[precision] in report.weight_bytes) == half
    if half and precision == "float32":
        assert 0 < costs[0] == pytest.approx(report.parity[0].relative, rel=0.1)


@pytest.mark.issue("keras#17381", "keras#18979")
def test_weights_are_stored_once_and_half_of_them_is_half(target):
    model = keras.Sequential([keras.Input((256,)), L.Dense(256), L.Dense(256)])
    full = tfamp.export(model, target / "full")
    assert full.weight_bytes == {"float32": 4 * model.count_params()}
    assert full.latency_ratio > 0 and full.parity[0].relative < 1e-5
    half = tfamp.export(model, target / "half", half_weights=True)
    kernels = 2 * 256 * 256
    assert half.weight_bytes == {"float16": 2 * kernels, "float32": 4 * 512}
    assert half.bytes / half.float32_bytes < 0.6
    assert 0 < half.weights_parity[0].relative < epsilon("float32")
    data = json.loads(json.dumps(half.to_dict()))
    assert data["parity"][0]["name"] == "output_0"
    for part in ("output_0", "of that, by 16-bit weights", "in float16", "alternating"):
        assert part in half.to_text()


def test_statistics_of_normalization_keep_their_bits(target):
    model = models.convolutions()
    norm = next(x for x in model.layers if isinstance(x, L.BatchNormalization))
    norm.moving_variance.assign([1e5, 1e-9, 2.0, 3.0])  # Beyond float16, both ways.
    report = tfamp.export(model, target, half_weights=True)
    assert report.parity[0].relative < 8 * epsilon("float32")


def test_layers_kept_in_float32_stay_so_and_others_follow(target):
    stack = [L.Dense(8, name="a"), L.Dense(8, name="b"), L.Dense(8, name="c")]
    model = keras.Sequential([keras.Input((4,)), *stack], name="stack")
    tfamp.set_precision(model, F16, {"stack/a": "float32", "stack/c": F16})
    report = tfamp.export(model, target, BF16)
    assert report.products == {"float32": 1, "bfloat16": 2}


def test_state_goes_on_from_call_to_call_with_16_bit_weights(target):
    model = built(models.stateful_rnn)
    tfamp.export(model, target, half_weights=True)
    serve, x = reloaded(target), models.batch(model)
    for _ in range(3):
        (served,) = serve(tf.constant(x)).values()
        np.testing.assert_allclose(served, model(x), rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    ("build", "sample"),
    [(words, np.array(["a b", "b c"])), (Classes, {"ids": np.array([[1, 2], [3, 8]])})],
)
def test_strings_ids_and_classes_pass_through(build, sample, target):
    model = built(build)
    model(keras.tree.map_structure(tf.constant, sample))
    for half in (False, True):
        path = target / str(half)
        report = tfamp.export(
            model, path, BF16, half_weights=half, sample_inputs=sample
        )
        assert {row.relative < 0.05 for row in report.parity} == {True}


@pytest.mark.parametrize("precision", STORED)
def test_images_of_another_size_than_it_was_built_with(precision, target):
    image = keras.Input((None, None, 3), name="image")
    x = L.Conv2D(8, 3, padding="same", activation="relu")(image)
    low = L.Conv2D(8, 3, padding="same", activation="relu")(L.MaxPooling2D()(x))
    x = L.Concatenate()([x, L.UpSampling2D()(low)])
    unet = keras.Model(image, L.Conv2D(1, 1, name="mask")(x))
    unet(np.zeros((1, 16, 16, 3), "float32"))
    tfamp.export(unet, target, precision, half_weights=True)
    x = np.random.default_rng(0).normal(size=(3, 24, 40, 3)).astype("float32")
    (served,) = reloaded(target)(tf.constant(x)).values()
    assert served.shape == (3, 24, 40, 1)
    gap = np.linalg.norm(served - unet(x)) / np.linalg.norm(unet(x))
    assert gap < 8 * epsilon(precision)


# ---- LiteRT ----


@pytest.mark.issue("tensorflow#117542", "tensorflow#120290")
@pytest.mark.parametrize(
    "name", helpers.names_of(["convolutions", "shared", "dict"], ["shared", "dict"])
)
@pytest.mark.parametrize("half", [False, True])
def test_litert_is_run_by_the_interpreter(name, half, target):
    def several():
        a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
        return keras.Model({"a": a, "b": b}, {"y": L.Dense(64)(a) + L.Dense(64)(b)})

    model = built({**models.MODELS, "dict": several}[name], BF16)
    before, path = models.described(model), target.with_suffix(".tflite")
    if not HAS_LITERT:
        with pytest.raises(tfamp.ExportError, match="Keras 3.13 or newer"):
            tfamp.export(model, path, format="litert")
        return
    report = tfamp.export(model, path, format="litert", half_weights=half)
    assert models.described(model) == before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert tf.lite.Interpreter(str(path)).get_signature_list()
    limit = 8 * epsilon("float32") if half else 1e-5
    assert max(row.relative for row in report.parity) < limit
    assert bool(report.weights_parity) == half
    tfamp.export(model, path, format="litert", overwrite=True)
    assert os.listdir(path.parent) == [path.name]


# ---- What is refused ----


def sequential_of(weight):
    model = models.sequential()
    model.layers[0].kernel.assign(np.full((4, 5), weight))
    return model


def no_kernel():
    return keras.Sequential([keras.Input((4,)), L.LayerNormalization()])


LITERT = {"path": "x.tflite", "format": "litert"}
BAD: dict[str, Any] = {
    "overflow": (
        *(lambda: sequential_of(6e4), F16, {"sample_inputs": np.ones((2, 4))}),
        *(tfamp.ExportError, "mixed_float16 overflows on the sample inputs: 4 of 4"),
    ),
    "weight": (
        *(lambda: sequential_of(1e6), "float32", {"half_weights": True}),
        *(tfamp.ExportError, "float16 overflows in weight '.*kernel'"),
    ),
    "LiteRT weight": (
        *(lambda: sequential_of(1e6), "float32", {"half_weights": True, **LITERT}),
        *(tfamp.ExportError, "float16 overflows in weight '.*kernel'|3.13 or newer"),
    ),
    "no weights": (
        *(no_kernel, "float32", {"half_weights": True}, tfamp.ExportError),
        "two axes or more",
    ),
    "nothing": (no_kernel, BF16, {}, tfamp.ExportError, "no product of bfloat16"),
    "mode": (models.sequential, "bfloat16", {}, ValueError, "'mixed_bfloat16'"),
    "tf32": (models.sequential, "tf32", {}, ValueError, "must be one of 'float32'"),
    "format": (models.sequential, BF16, {"format": "tflite"}, ValueError, "'litert'"),
    "16-bit LiteRT": (models.sequential, BF16, LITERT, ValueError, "LiteRT computes"),
    "suffix": (
        *(models.sequential, "float32", {**LITERT, "path": "x"}, ValueError, "tflite"),
    ),
    "dict": (
        *(models.sequential, BF16, {"sample_inputs": {"x": np.ones((2, 4))}}),
        *(tfamp.ExportError, "must have the structure"),
    ),
}


@pytest.mark.issue("tensorflow#43719")
@pytest.mark.parametrize("case", BAD)
def test_refused_by_one_error_and_nothing_is_left(case, tmp_path):
    build, precision, options, error, message = BAD[case]
    model = built(build)
    before, path = models.described(model), tmp_path / options.get("path", "exported")
    with pytest.raises(error, match=message):
        tfamp.export(model, **{"precision": precision, **options, "path": path})
    assert os.listdir(tmp_path) == []
    assert models.described(model) == before
    if case == "dict":
        with pytest.raises(error, match=message):
            tfamp.export_float32(model, path, **options)
    if case == "overflow":  # bfloat16 has the range.
        assert tfamp.export(model, path, BF16).parity[0].relative < 0.1
