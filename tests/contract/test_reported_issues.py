"""What users reported of mixed precision in Keras, each with its thread."""

import pathlib
import re
from concurrent import futures
from typing import Any

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfamp

pytestmark = pytest.mark.usefixtures("disabled")

LOW, in_both = helpers.LOW, helpers.in_both


# ---- Outputs ----

LABEL = 30000  # In bfloat16 29952, in float16 30000 is exact; 2049 is 2048.
WRONG = {"mixed_bfloat16": (30000, 29952), "mixed_float16": (2049, 2048)}


def constant(predicted):
    """A model whose largest output is that of one class."""
    bias = np.eye(1, LABEL + 1, predicted, "float32")[0]
    model = keras.Sequential([keras.Input((1,)), layers.Dense(LABEL + 1)])
    model.set_weights([np.zeros((1, LABEL + 1), "float32"), bias])
    return model


@pytest.mark.issue("tensorflow#45568")
@pytest.mark.issue("keras#15012")
@pytest.mark.issue("keras#11965")
@in_both
def test_class_ids_are_not_rounded_to_the_format_of_the_outputs(mode, tmp_path):
    tfamp.enable(mode)
    label, predicted = WRONG[mode]
    model = constant(predicted)
    metrics = ["accuracy", "sparse_top_k_categorical_accuracy"]
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=metrics)
    x, y = np.ones((4, 1)), np.full(4, label)
    assert model.evaluate(x, y, verbose=0, return_dict=True)["accuracy"] == 0
    assert model.fit(x, y, verbose=0).history["accuracy"] == [0]
    # A loop of one's own.
    outputs = model(x)
    assert outputs.dtype == "float32"
    assert model.compute_loss(y=y, y_pred=outputs).dtype == "float32"
    assert model.compute_metrics(None, y, outputs)["accuracy"] == 0
    # Predictions can be saved.
    found = model.predict(x, verbose=0)
    assert found.dtype == model.predict_on_batch(x).dtype == "float32"
    np.save(tmp_path / "p.npy", found)
    assert np.load(tmp_path / "p.npy").dtype == "float32"


@pytest.mark.issue("keras#15012")
@in_both
def test_the_class_to_ignore_is_not_taken_for_its_neighbors(mode):
    """The loss as a function, which does not cast, as the class of it does."""
    tfamp.enable(mode)
    label, ignored = WRONG[mode]
    keywords = {"from_logits": True, "ignore_class": ignored}
    losses = (
        lambda *y: keras.losses.sparse_categorical_crossentropy(*y, **keywords),
        keras.losses.SparseCategoricalCrossentropy(**keywords),
    )
    model, x = constant(0), np.ones((2, 1))
    for loss in losses:
        model.compile("sgd", loss)
        assert model.evaluate(x, np.full(2, label), verbose=0) > 1
        assert model.evaluate(x, np.full(2, ignored), verbose=0) == 0


class Outputs(keras.Model):
    """Notes the dtypes that come to a loss of its own."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.Input((2,)), layers.Dense(2)])
        self.head = layers.Dense(1)
        self.wide = layers.Dense(1, dtype="float64", name="wide")
        self.seen = {}

    def call(self, x):
        inner = self.inner(x)
        self.seen["inner"] = inner.dtype.name
        return {"low": self.head(inner), "wide": self.wide(inner)}

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        self.seen["loss"] = [y_pred[key].dtype.name for key in sorted(y_pred)]
        # Keras casts what a loss function gets, and not what this method gets.
        low = y_pred["low"]
        wide = tf.cast(y_pred["wide"], low.dtype)
        return tf.reduce_mean(low + wide - tf.cast(y, low.dtype))


@pytest.mark.issue("keras#15012")
@pytest.mark.issue("tensorflow#61771")
@in_both
@pytest.mark.parametrize("cast", [True, False])
def test_only_the_outermost_models_outputs_of_16_bits_are_cast(mode, cast):
    low = {"outputs.*/dense.*": mode}  # Else they would compute in float32.
    tfamp.enable(mode, overrides=low, float32_outputs=cast, loss_scale=False)
    model, x = Outputs(), np.ones((4, 2), "float32")
    model.compile("sgd")
    model.fit(x, np.ones((4, 1)), verbose=0)
    dtype = "float32" if cast else LOW[mode].name
    assert model.seen == {"inner": LOW[mode].name, "loss": [dtype, "float64"]}
    found = model.predict_on_batch(x)
    assert found["wide"].dtype == "float64" and found["low"].dtype.name == dtype


class OwnSteps(keras.Model):
    """A loop of its own, as Keras' guide writes it, and metrics of its own."""

    def __init__(self):
        super().__init__()
        self.inner = constant(WRONG["mixed_bfloat16"][1])
        self.hits = keras.metrics.SparseCategoricalAccuracy(name="hits")
        self.seen = []

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y = data
        outputs = self(x, training=True)
        self.hits.update_state(y, outputs)
        return {"hits": self.hits.result()}

    def predict_step(self, data):
        return self(data[0] if isinstance(data, tuple) else data)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.seen.append(y_pred.dtype.name)
        return super().compute_metrics(x, y, y_pred, sample_weight)


@pytest.mark.issue("keras#15012")
@pytest.mark.parametrize("eager", [False, True])
def test_steps_of_ones_own_get_float32(eager):
    tfamp.enable("mixed_bfloat16")
    model, x, y = OwnSteps(), np.ones((4, 1)), np.full((4, 1), LABEL)
    loss = "sparse_categorical_crossentropy"
    model.compile("sgd", run_eagerly=eager)
    assert model.fit(x, y, verbose=0).history["hits"] == [0]
    assert model.predict(x, verbose=0).dtype == "float32"
    model.compile("sgd", loss, metrics=["accuracy"], run_eagerly=eager)
    assert model.evaluate(x, y, verbose=0, return_dict=True)["accuracy"] == 0
    assert model.seen and set(model.seen) == {"float32"}
    assert "call" not in vars(model) and model(x).dtype == "float32"


@pytest.mark.issue("keras#15012")
def test_masks_of_outputs_count_in_losses_and_metrics():
    def evaluated(**keywords):
        tfamp.enable("mixed_bfloat16", **keywords)
        keras.utils.set_random_seed(0)
        body = [layers.Embedding(9, 4, mask_zero=True), layers.Dense(1)]
        model = keras.Sequential([keras.Input((6,), dtype="int32"), *body])
        model.compile("sgd", "mse", metrics=["mae"])
        x = np.array([[1, 2, 0, 0, 0, 0], [3, 4, 5, 0, 0, 0]])
        return model.evaluate(x, np.where(x[..., None] > 0, 0.0, 100.0), verbose=0)

    np.testing.assert_allclose(evaluated(), evaluated(float32_outputs=False), rtol=0.01)


# ---- Inputs ----

YEARS = np.array([[2014.0, 110000.0], [2015.0, 110001.0]], "float32")
SCALED = [[-1.0, -1.0], [1.0, 1.0]]


def normalization(**keywords):
    mean, variance = [2014.5, 110000.5], [0.25, 0.25]
    layer = layers.Normalization(mean=mean, variance=variance, **keywords)
    layer.build((None, 2))
    return layer


class Holds(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def build(self, shape):
        self.layer.build(shape)

    def call(self, x):
        return self.layer(x)


def functional(layer):
    inputs = keras.Input((2,))
    return keras.Model(inputs, layer(inputs))


PLACES = {
    "bare": lambda layer: layer,
    "sequential": lambda layer: keras.Sequential([keras.Input((2,)), layer]),
    "sequential without input": lambda layer: keras.Sequential([layer]),
    "functional": functional,
    "subclassed": Holds,
    "functional in a subclassed one": lambda layer: Holds(functional(layer)),
    "subclassed in a subclassed one": lambda layer: Holds(Holds(layer)),
}


def bins():
    return layers.Discretization(bin_boundaries=[109999.5, 110000.5])


def numbered(rows=4000):
    """An embedding whose row i is i modulo 7."""
    table = np.arange(rows)[:, None] % 7
    return layers.Embedding(rows, 1, weights=table.astype("float32"))


IDS = np.array([[2909.0, 2917.0]], "float32")
KINDS = {
    "normalization": (normalization, YEARS, SCALED),
    "bins": (bins, YEARS, [[0, 1], [0, 2]]),
    "ids": (numbered, IDS, IDS % 7),
}
RUNS = [("normalization", run) for run in ("eager", "graph", "predict")]
RUNS += [("bins", "eager"), ("ids", "eager")]
INPUTS = [(place, *run) for place in PLACES for run in RUNS]
INPUTS.remove(("sequential", "ids", "eager"))  # Keras makes them integers.


@pytest.mark.issue("keras#19332")
@in_both
@pytest.mark.parametrize(("place", "kind", "run"), INPUTS)
def test_what_comes_into_a_model_is_not_rounded_before_use(mode, place, kind, run):
    tfamp.enable(mode)
    make, values, expected = KINDS[kind]
    model = PLACES[place](make())
    if run == "predict":
        model = model if isinstance(model, keras.Model) else Holds(model)
        found = model.predict(values, verbose=0)
    else:
        call = tf.function(model) if run == "graph" else model
        found = call(tf.constant(values))
    np.testing.assert_array_equal(np.reshape(found, np.shape(expected)), expected)


@pytest.mark.issue("keras#19332")
@pytest.mark.parametrize(
    "kind", ["Rescaling", "Normalization", "RandomFlip", "UnitNormalization"]
)
def test_layers_of_raw_inputs_are_float32_unless_asked(kind):
    def make():
        return getattr(layers, kind)(*[1 / 255] * (kind == "Rescaling"))

    tfamp.enable("mixed_bfloat16")
    first, called = make(), make()
    keras.Sequential([keras.Input((4, 4, 3)), first]).compile("sgd", "mse")
    called(np.ones((1, 4, 4, 3), "float32"))
    assert first.compute_dtype == called.compute_dtype == "float32"
    tfamp.enable("mixed_bfloat16", overrides={"m/asked": "mixed_bfloat16"})
    given = type(make()).from_config({**make().get_config(), "name": "asked"})
    keras.Sequential([keras.Input((4, 4, 3)), given], name="m").compile("sgd", "mse")
    assert given.compute_dtype == "bfloat16"
    asked = type(make()).from_config({**make().get_config(), "name": "asked"})
    model = keras.Sequential([keras.Input((4, 4, 3)), asked], name="m")
    tfamp.disable()
    tfamp.set_precision(model, "mixed_bfloat16")
    assert asked.compute_dtype == "float32"
    tfamp.set_precision(model, "mixed_bfloat16", {"m/asked": "mixed_bfloat16"})
    assert asked.compute_dtype == "bfloat16"
    assert make().compute_dtype == "float32"  # The default again.
    with tfamp.policy_scope("mixed_bfloat16"):
        assert make().compute_dtype == "bfloat16"


@pytest.mark.issue("keras#19332")
@in_both
def test_ids_that_are_16_bit_floats_are_an_error_where_they_are_rounded(mode):
    tfamp.enable(mode)
    ids = tf.constant([[5.0]], LOW[mode])
    with pytest.raises(ValueError, match="are rounded above .* Pass integers"):
        numbered()(ids)
    assert numbered(100)(ids).shape == (1, 1, 1)


@pytest.mark.issue("keras#19332")
def test_gradients_pass_through_inputs_that_are_not_rounded():
    tfamp.enable("mixed_bfloat16")
    inner = functional(layers.Dense(1, kernel_initializer="ones", dtype="float32"))

    class Slope(keras.Model):
        def call(self, x):
            return helpers.value_and_gradient(inner)(x)[1]

    x = tf.constant(YEARS)
    _, slope = helpers.value_and_gradient(lambda x: inner(x) ** 2)(x)
    np.testing.assert_allclose(slope, 2 * inner(x) * np.ones((1, 2)))
    np.testing.assert_array_equal(Slope()(x), np.ones((2, 2)))


@pytest.mark.issue("keras#19332")
def test_values_that_were_rounded_before_they_are_normalized_are_told_of():
    tfamp.enable("mixed_bfloat16")
    same = layers.Dense(2, kernel_initializer="identity")
    model = keras.Sequential([same, normalization(name="late"), layers.Dense(1)])
    with pytest.warns(UserWarning, match="'late' receives values that"):
        model(YEARS)


# ---- Layers ----


@pytest.mark.issue("keras#23546")
@in_both
def test_gradients_of_unit_normalization_are_finite(mode):
    tfamp.enable(mode)
    layer, factors = layers.UnitNormalization(), [1.0, 2.0, 3.0, 4.0]
    run = helpers.value_and_gradient(lambda x: tf.cast(layer(x), "float32") * factors)
    exact = [[-250.0, -250 / 3, 250 / 3, 250.0]]
    np.testing.assert_allclose(run(tf.fill((1, 4), 3e-3))[1], exact, rtol=1e-4)


@pytest.mark.issue("keras#17508")
@in_both
@pytest.mark.parametrize("kind", ["MixUp", "CutMix"])
def test_mixing_images_runs(mode, kind):
    tfamp.enable(mode)
    batch = {"images": np.ones((4, 8, 8, 3), "float32"), "labels": np.eye(4)}
    mixed = getattr(layers, kind)()(batch, training=True)
    assert mixed["images"].dtype == mixed["labels"].dtype == "float32"


@pytest.mark.issue("keras#20931")
@in_both
def test_bilinear_upsampling_trains_under_xla(mode):
    tfamp.enable(mode)
    larger = layers.UpSampling2D(2, interpolation="bilinear")
    stack = layers.Conv2D(2, 1), larger, layers.Conv2D(1, 1)
    model = keras.Sequential([keras.Input((4, 4, 2)), *stack])
    data = np.ones((2, 4, 4, 2)), np.ones((2, 8, 8, 1))
    assert np.isfinite(helpers.fit(model, *data, jit_compile=True)).all()
    assert larger.compute_dtype == "float32"


@pytest.mark.issue("tensorflow#46392")
@in_both
def test_losses_fall_under_xla_as_they_do_without(mode):
    def losses(jit_compile):
        keras.utils.set_random_seed(0)
        body = [layers.Dense(16, "relu"), layers.BatchNormalization()]
        model = keras.Sequential([keras.Input((2,)), *body, layers.Dense(1)])
        x = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")
        few = {"jit_compile": jit_compile, "epochs": 8}
        return helpers.fit(model, x, x[:, :1], keras.optimizers.SGD(0.1), **few)

    tfamp.enable(mode)
    found = losses(True)
    assert found[-1] < 0.2 * found[0]
    np.testing.assert_allclose(found, losses(False), rtol=0.05)


@pytest.mark.issue("tensorflow#48662")
def test_the_recipe_for_a_gradient_penalty_keeps_the_scale_and_learns_as_in_float32():
    page = pathlib.Path(__file__).parents[2] / "docs/custom_loops.md"
    (code,) = re.findall(r"```python\n([^`]*penalty[^`]*)```", page.read_text())
    low, exact = {}, {}
    exec(code, low)
    exec(code.replace("mixed_float16", "float32"), exact)
    optimizer = low["optimizer"]
    assert int(optimizer.skipped_steps) == 0
    assert float(optimizer.loss_scale) == optimizer.initial_scale
    np.testing.assert_allclose(low["losses"], exact["losses"], rtol=0, atol=0.02)
    assert low["losses"][-1] < low["losses"][0] - 1


@pytest.fixture
def slow_here():
    """Skips where the table has no row: on GPUs, and where bfloat16 is emulated."""
    if "bfloat16" not in tfamp.enable("mixed_bfloat16").float32_layers:
        pytest.skip("no layer is known to be slower in bfloat16 on this device")


def mobile():
    """A block as of MobileNetV2."""
    inputs = keras.Input((8, 8, 4))
    x = layers.Conv2D(8, 1, name="expand")(inputs)
    x = layers.DepthwiseConv2D(3, name="same")(x)
    x = layers.DepthwiseConv2D(3, strides=2, name="strided")(x)
    x = layers.SeparableConv2D(8, 5, padding="same", name="wide")(x)
    return keras.Model(inputs, layers.Dense(99, name="head")(layers.Flatten()(x)))


def made_late():
    parts = mobile().layers[1:]
    configs = [type(each).from_config(each.get_config()) for each in parts]
    return keras.Sequential(configs)


@pytest.mark.issue("tensorflow#41715")
@pytest.mark.parametrize("build", [mobile, made_late])
def test_layers_that_are_slower_in_16_bits_stay_in_float32(build, slow_here):
    model = build()
    assert model.layers[-1].compute_dtype == "bfloat16"
    helpers.fit(model, np.ones((4, 8, 8, 4)), np.ones((4, 99)))
    found = {each.name: each.compute_dtype for each in model.layers if each.weights}
    kept = {name for name, dtype in found.items() if dtype == "float32"}
    assert kept == {"strided", "wide", "head"} and found["expand"] == "bfloat16"
    rows = tfamp.describe_layers(model)
    (reason,) = [row.reason for row in rows if row.path.endswith("strided")]
    assert "times slower in bfloat16 on this CPU" in reason


@pytest.mark.issue("tensorflow#41715")
@pytest.mark.parametrize("how", ["overrides", "float16"])
def test_an_override_or_another_mode_keeps_slow_layers_in_16_bits(how, slow_here):
    mode = "mixed_float16" if how == "float16" else "mixed_bfloat16"
    tfamp.enable(mode, overrides={".*": mode} if how == "overrides" else None)
    model = mobile()
    model.compile("sgd", "mse")
    assert model.get_layer("strided").compute_dtype == mode.removeprefix("mixed_")


@pytest.mark.issue("tensorflow#41715")
@pytest.mark.parametrize(
    ("device", "rule", "named", "other"),
    [
        ("cpu-avx512-bf16", "slow", "strided", "depthwise"),
        ("a100", *["depthwise"] * 2, "slow"),
    ],
)
def test_the_audit_names_slow_layers_that_no_plan_keeps(device, rule, named, other):
    """CPUs have measured rows; of a GPU only the kind of layer is known."""
    with tfamp.policy_scope("mixed_bfloat16"):
        model = mobile()
    model.compile("sgd", "mse")
    texts = {x.rule: str(x) for x in tfamp.audit(model, device=device).findings}
    assert named in texts[rule] and "wide" in texts[rule] and other not in texts
    assert ("same" in texts[rule]) == (device == "a100")


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_that_no_mix_makes_faster_is_told_of_once(wrapped, slow_here):
    gru = layers.GRU(16, name="gru")
    body = [layers.Embedding(9, 4), layers.Bidirectional(gru) if wrapped else gru]
    model = keras.Sequential([keras.Input((5,)), *body, layers.Dense(1)])
    with pytest.warns(UserWarning, match="float32 is faster for this model") as caught:
        for _ in range(2):
            helpers.fit(model, np.ones((4, 5)), np.ones((4, 1)))
    (text,) = helpers.warned(caught)
    assert "1.3 times slower" in text


# ---- What is said ----


@keras.saving.register_keras_serializable("tfamp_tests")
class Overflows(layers.Layer):
    def call(self, x):
        return x * 6e4 * 6e4


def overflowing():
    """A model whose every step in float16 is skipped."""
    body = [layers.Dense(2), Overflows(), layers.Dense(2)]
    model = keras.Sequential([keras.Input((2,)), *body])
    model.compile("sgd", "mse")
    return model


@pytest.mark.issue("DeepSpeed#697")
@pytest.mark.issue("keras#16100")
def test_an_epoch_of_skipped_steps_is_told_of_once():
    tfamp.enable("mixed_float16", heal=False)
    x, y = np.ones((64, 2)), np.ones((64, 2))
    said = "16 of the 16 training steps|heal=False"
    with pytest.warns(UserWarning, match=said) as caught:
        overflowing().fit(x, y, batch_size=4, epochs=3, verbose=0)
    found, text = helpers.warned(caught)
    assert "loss scale is 0.5" in text and "-1e9" in text
    assert "overflows" in found and "heal=False" in found


@pytest.mark.issue("keras#16100")
def test_what_skips_no_step_is_not_told_of():
    tfamp.enable("mixed_float16")
    x: Any = np.ones((64, 2))
    overflowing().evaluate(x, x, verbose=0)
    model = overflowing()
    tfamp.disable()
    model.fit(x, x, batch_size=2, epochs=2, verbose=0)


def small():
    inputs = keras.Input((2,))
    body = layers.Dense(3, name="body")(inputs)
    return keras.Model(inputs, layers.Dense(1, name="head")(body), name="small")


def fit(model):
    helpers.fit(model, np.ones((4, 2)), np.ones((4, 1)))


def built_before(mode, path):
    model = small()
    tfamp.enable(mode)
    return model


def loaded(mode, path):
    small().save(path)
    tfamp.enable(mode)
    return keras.models.load_model(path)


def of_another_thread(mode, path):
    tfamp.enable(mode)
    with futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(small).result()


def nested(mode, path):
    inner = built_before(mode, path)
    inputs = keras.Input((2,))
    return keras.Model(inputs, layers.Dense(1)(inner(inputs)))


@pytest.mark.parametrize(
    ("mode", "origin"),
    [
        *(("mixed_bfloat16", each) for each in (built_before, loaded, nested)),
        *(("mixed_float16", each) for each in (built_before, of_another_thread)),
    ],
)
def test_a_model_from_elsewhere_is_named_once(mode, origin, tmp_path):
    model = origin(mode, tmp_path / "m.keras")
    with pytest.warns(UserWarning, match="'small' was built before") as caught:
        fit(model)
        fit(model)
    (text,) = helpers.warned(caught)
    assert "(body, head)" in text and "set_precision" in text


@in_both
def test_models_in_the_mode_are_not_named(mode):
    converted = small()
    tfamp.enable(mode)
    tfamp.set_precision(converted, mode)
    head = layers.Dense(1, dtype="float32")
    pinned = layers.Dense(2), head
    heads = normalization(), keras.Sequential([layers.Dense(1, dtype="float32")])
    stacks = [keras.Sequential([keras.Input((2,)), *each]) for each in (pinned, heads)]
    for model in (converted, small(), *stacks):
        fit(model)  # Warnings are errors.


def test_status_tells_which_thread_has_the_policy():
    tfamp.enable("mixed_bfloat16")
    with futures.ThreadPoolExecutor(1) as thread:
        found = thread.submit(tfamp.status).result()
    assert "'MainThread'" in found.reason and "was changed" not in found.reason
    assert "'MainThread'" not in tfamp.status().reason
    assert all(": " in line for line in str(found).splitlines())


@pytest.mark.issue("keras#19479")
@pytest.mark.issue("keras#20894")
@pytest.mark.issue("tensorflow#64124")
@pytest.mark.parametrize(
    ("name", "now"),
    [("get_scaled_loss", "scale_loss"), ("get_unscaled_gradients", "apply")],
)
def test_names_of_keras_2_say_what_replaces_them(name, now):
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(AttributeError, match=f"{name}.*`{now}"):
        getattr(optimizer, name)
    assert not hasattr(optimizer, name) and not hasattr(optimizer, "nothing")


@pytest.mark.issue("keras#9582", "keras#10262", "keras#11853")
@in_both
@pytest.mark.parametrize("floatx", ["float16", "bfloat16"])
def test_losses_and_metrics_of_16_bits_are_told_of_when_compiled(mode, floatx):
    tfamp.enable(mode)
    keras.config.set_floatx(floatx)
    try:
        model = small()
        with pytest.warns(UserWarning, match="set_floatx") as caught:
            model.compile("sgd", "mse")
            model.compile("sgd", "mse")
    finally:
        keras.config.set_floatx("float32")
    (text,) = helpers.warned(caught)
    assert f"is {floatx!r}" in text
    assert {each.dtype for each in model.trainable_variables} == {"float32"}
    fit(model)  # Warnings are errors.


class HoldsAnOptimizer(layers.Dense):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.own_optimizer = keras.optimizers.SGD(name="inside")


@pytest.mark.issue("tensorflow#59826")
def test_unscaled_optimizers_of_layers_are_named():
    tfamp.enable("mixed_float16")
    model = keras.Sequential([keras.Input((2,)), HoldsAnOptimizer(1, name="held")])
    with pytest.warns(UserWarning, match=r"held\.own_optimizer \(inside\)"):
        fit(model)


# ---- float32 ----


def three_steps():
    keras.utils.set_random_seed(7)
    inputs = keras.Input((3,), dtype="int32")
    x = layers.Embedding(5, 4)(inputs)
    model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(x)))
    adam, ids = keras.optimizers.Adam(0.1, global_clipnorm=0.5), [[1, 1, 2], [1, 4, 4]]
    helpers.fit(model, np.array(ids), np.ones((2, 1)), adam, epochs=3)
    return model.get_weights() + [v.numpy() for v in model.optimizer.variables]


def test_enable_float32_is_stock_keras_bit_for_bit():
    expected = three_steps()
    tfamp.enable("float32")
    helpers.assert_equal(three_steps(), expected)


@in_both
def test_positions_beyond_256_are_told_apart(mode):
    keras_hub = pytest.importorskip("keras_hub")

    def encode():
        encoding = keras_hub.layers.SinePositionEncoding()
        model = keras.Sequential(
            [keras.Input((600, 8)), layers.Dense(8), encoding, layers.Dense(1)]
        )
        model.compile("sgd", "mse")
        return encoding(tf.zeros((1, 600, 8)))

    wanted = encode()
    with helpers.enabled(mode):
        found = encode()
    np.testing.assert_allclose(found, wanted, atol=1e-2)
