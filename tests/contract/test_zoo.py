"""Models that people use, in both mixed modes; `TFAMP_ZOO_TABLE=1` writes the page.

Every family of `keras.applications` (its smallest member, the smallest input that it
takes) and the backbones of KerasHub, made tiny by their arguments. Three of them run by
default, in a mode each; the others by `pytest -m zoo`, all by `-m "zoo or not zoo"`.
"""

import datetime
import inspect
import itertools
import os
import pathlib
import re

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

import tfamp

BF16, F16 = MODES = ("mixed_bfloat16", "mixed_float16")
pytestmark = [  # Keras' and KerasHub's own; a warning of tfamp is an error.
    pytest.mark.filterwarnings(f"ignore:{words}")
    for words in (
        r"(Layer '|Gradients do not exist|`(build|compile)\(\)` was):UserWarning",
        "(.|\n)*overflow encountered in cast:RuntimeWarning",
    )
]
PAGE = pathlib.Path(__file__).parents[2] / "docs/maintainers/zoo.md"
MOST = 1e-5  # Relative; what `export_float32` allows a reloaded graph.

# ---- The table of models ----


def application(name):
    size = {"InceptionResNetV2": 75, "InceptionV3": 75, "Xception": 71}.get(name, 32)
    make = getattr(keras.applications, name)
    return lambda: make(weights=None, classes=5, input_shape=(size, size, 3))


def backbone(name):
    make = getattr(keras_hub.models, f"{name}Backbone", None)
    if make is None:
        return None  # Of a newer KerasHub.
    taken = inspect.signature(make.__init__).parameters
    given = {key: value for key, value in TINY.items() if key in taken}
    return lambda: make(**given | SPECIAL.get(name, {}))


def text_classifier():
    bert = backbone("Bert")()
    return keras_hub.models.BertTextClassifier(bert, num_classes=3, preprocessor=None)


APPLICATIONS = """ConvNeXtTiny DenseNet121 EfficientNetB0 EfficientNetV2B0
    InceptionResNetV2 InceptionV3 MobileNet MobileNetV2 MobileNetV3Small NASNetMobile
    ResNet50 ResNet50V2 VGG16 Xception"""
# Without DINOV2; docs/maintainers/zoo.md says why.
BACKBONES = """Albert Bart Bert Bloom DebertaV3 DeiT DistilBert ESM Electra FNet Falcon
    GPT2 GPTNeoX Gemma Gemma3 Llama Llama3 MiT Mistral Mixtral OPT Phi3 Qwen Qwen3
    ResNet Roberta RoformerV2 SwinTransformer T5 ViT Whisper XLMRoberta XLNet"""
# fmt: off
TINY = {  # Each takes those that it knows.
    "vocabulary_size": 32, "vocab_size": 32, "num_layers": 2, "hidden_dim": 16,
    "intermediate_dim": 24, "mlp_dim": 24, "embedding_dim": 8, "num_heads": 2,
    "num_attention_heads": 2, "num_query_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "head_size": 8, "bucket_size": 8, "num_experts": 2, "image_size": 16,
    "image_shape": (32, 32, 3), "patch_size": 8, "max_encoder_sequence_length": 16,
}
SPECIAL = {
    "MiT": {
        "layerwise_depths": [1, 1], "layerwise_num_heads": [1, 2],
        "layerwise_sr_ratios": [2, 1], "max_drop_path_rate": 0.1,
        "hidden_dims": [8, 16], "layerwise_patch_sizes": [7, 3],
        "layerwise_strides": [4, 2],
    },
    "ResNet": {
        "input_conv_filters": [64], "input_conv_kernel_sizes": [3],
        "stackwise_num_filters": [64, 64], "stackwise_num_blocks": [1, 1],
        "stackwise_num_strides": [1, 2], "block_type": "basic_block",
    },
    "SwinTransformer": {
        "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4,
        "patch_size": 4,
    },
}
# fmt: on
MODELS = {name: application(name) for name in APPLICATIONS.split()}
MODELS |= {n: made for n in BACKBONES.split() if (made := backbone(n))}
MODELS["BertTextClassifier"] = text_classifier
BY_DEFAULT = {
    "BertTextClassifier": BF16,
    "Llama": F16,
    "MobileNet": BF16,
}
LARGE = "BertTextClassifier", "Llama"

STEPS = ("trains", "saves", "exports", "exact", "back")
# (model, mode): {step: why it fails in plain Keras, too}.
RANGE = "`arange` in float16: TensorFlow has no such kernel for a graph"
MASK = "its mask is `0 * -1e9`, which is NaN in float16"
LOSS = "its loss for the router multiplies 16-bit masks by float32 ones"
KNOWN = {
    ("ESM", F16): dict.fromkeys(("trains", "back"), RANGE),
    ("Mixtral", BF16): dict.fromkeys(("trains", "back"), LOSS),
    ("Mixtral", F16): dict.fromkeys(("trains", "back"), LOSS),
    ("RoformerV2", F16): dict.fromkeys(("trains", "back"), RANGE),
    ("T5", F16): dict.fromkeys(("trains", "saves", "back"), MASK),
}


# ---- The steps: the columns of the table ----


def batch(model):
    """Returns inputs for a model, and targets, of its outputs' shapes."""
    random = np.random.default_rng(0)

    def make(tensor):
        shape = [2, *(8 if size is None else size for size in tensor.shape[1:])]
        if keras.backend.is_float_dtype(tensor.dtype):
            return random.normal(size=shape).astype("float32")
        if "mask" in tensor.name:
            return np.tri(*shape, dtype="int32")  # One token, and two.
        most = 2 if "segment" in tensor.name else 20
        return random.integers(0, most, shape).astype("int32")

    inputs = keras.tree.map_structure(make, model.input)
    outputs = model(inputs, training=False)
    targets = keras.tree.map_structure(lambda y: random.uniform(size=y.shape), outputs)
    return inputs, targets


def outputs(model, inputs):
    flat = keras.tree.flatten(model(inputs, training=False))
    return [np.asarray(y).astype("float32") for y in flat]


def policies(model):
    return [row.policy for row in tfamp.describe_layers(model)]


def same_bits(found, expected):
    gaps = [np.max(np.abs(a - b)) for a, b in zip(found, expected, strict=True)]
    assert np.max(gaps) == 0, f"differs by {np.max(gaps):.1e}"


class Case:
    """A model in a mode, and what the steps ask of it."""

    def __init__(self, name, mode, folder, enable=tfamp.enable):
        keras.utils.set_random_seed(1)
        self.mode, self.folder = mode, folder
        self.twin = MODELS[name]()
        enable(mode)
        self.model = MODELS[name]()
        self.inputs, self.targets = batch(self.model)
        # Batch normalization of two small images makes gradients of any size.
        optimizer = keras.optimizers.SGD(0.01, global_clipnorm=1.0)
        self.model.compile(optimizer, "mse", metrics=[], jit_compile=False)
        assert mode in policies(self.model)

    def step(self):
        loss = self.model.train_on_batch(self.inputs, self.targets)
        assert np.all(np.isfinite(loss)), f"the loss is {loss}"

    def expected(self):
        self.twin.set_weights(self.model.get_weights())
        return outputs(self.twin, self.inputs)

    def trains(self):
        before = self.model.get_weights()
        for _ in range(6):  # Loss scaling may skip the first ones.
            self.step()
        after = self.model.get_weights()
        assert any(np.any(a != b) for a, b in zip(before, after, strict=True))

    def saves(self):
        path = self.folder / "model.keras"
        self.model.save(path)
        loaded = tfamp.load_model(path)
        assert policies(loaded) == policies(self.model)
        same_bits(outputs(loaded, self.inputs), outputs(self.model, self.inputs))

    def exports(self):
        path = self.folder / "exported"
        report = tfamp.export_float32(self.model, path, sample_inputs=self.inputs)
        serve = tf.saved_model.load(path).signatures["serving_default"]
        inputs = self.inputs
        if not isinstance(inputs, dict):
            inputs = {report.inputs[0].name: inputs}
        served = serve(**{name: tf.constant(x) for name, x in inputs.items()})
        for a, b in zip(keras.tree.flatten(served), self.expected(), strict=True):
            assert np.max(np.abs(a - b)) <= MOST * np.max(np.abs(b))

    def exact(self):
        tfamp.set_precision(self.model, "float32")
        assert set(policies(self.model)) == {"float32"}
        same_bits(outputs(self.model, self.inputs), self.expected())

    def back(self):
        tfamp.set_precision(self.model, self.mode)
        assert self.mode in policies(self.model)
        self.step()


def cases():
    for name, mode in itertools.product(MODELS, MODES):
        marks = pytest.mark.training if name in LARGE else ()
        if BY_DEFAULT.get(name) != mode:
            marks = pytest.mark.zoo
        yield pytest.param(name, mode, marks=marks)


passed = set()


@pytest.mark.parametrize(("name", "mode"), [*cases()])
def test_model(name, mode, tmp_path):
    failed = {}
    try:
        case = Case(name, mode, tmp_path)
        for step in STEPS:
            try:
                getattr(case, step)()
            except Exception as error:
                failed[step] = f"{type(error).__name__}: {error}"
    finally:
        tfamp.disable()
    assert set(failed) == set(KNOWN.get((name, mode), ())), failed
    passed.add((name, mode))
    if os.environ.get("TFAMP_ZOO_TABLE") and all((name, m) in passed for m in MODES):
        write_page(name, case.model.count_params())


@pytest.mark.zoo
@pytest.mark.parametrize("name, mode", KNOWN)
def test_known_failures_are_those_of_plain_keras(name, mode, tmp_path):
    try:
        case = Case(name, mode, tmp_path, enable=keras.config.set_dtype_policy)
        with pytest.raises((AssertionError, TypeError, ValueError)):
            case.trains()
    finally:
        keras.config.set_dtype_policy("float32")


# ---- docs/maintainers/zoo.md ----

RULE = "|---|---|---|---|---|---|---|\n"


def row(name, parameters):
    cells = [name, f"{parameters:,}"]
    for step in STEPS:
        why = {mode: KNOWN.get((name, mode), {}).get(step, "") for mode in MODES}
        reasons = {f"{mode}: {reason}" for mode, reason in why.items() if reason}
        cells.append(why[F16] if len(reasons) == 2 else "".join(reasons) or "✓")
    return f"| {' | '.join(cells)} |"


def rows_of(page):
    """Returns {model: its row} of the page's table."""
    lines = page.partition(RULE)[2].splitlines()
    return {line.split(" | ")[0][2:]: line for line in lines}


def write_page(name, parameters):
    """Puts a model that ran in both modes into the page, and the date."""
    page = PAGE.read_text()
    rows = rows_of(page) | {name: row(name, parameters)}
    stamp = (
        f"Run on {datetime.date.today()}: TensorFlow {tf.__version__}, Keras "
        f"{keras.__version__}, KerasHub {keras_hub.__version__}, "
        f"{os.cpu_count()} cores of an {tfamp.status().device}."
    )
    top = re.sub(r"^Run on.*$", stamp, page.partition(RULE)[0], flags=re.M)
    lines = [rows[each] for each in MODELS if each in rows]
    PAGE.write_text("\n".join([top + RULE[:-1], *lines, ""]))


@pytest.mark.skipif(
    keras.__version__ < "3.15", reason="the page is of the newest releases"
)
def test_page_has_each_model_and_each_known_failure():
    rows = rows_of(PAGE.read_text())
    assert list(rows) == list(MODELS)
    for name, line in rows.items():
        assert line == row(name, int(line.split(" | ")[1].replace(",", "")))
