"""enable, disable, status, and what they do to an unchanged Keras script."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

V100 = ("GPU", {"device_name": "Tesla V100", "compute_capability": (7, 0)})
A100 = ("GPU", {"device_name": "NVIDIA A100", "compute_capability": (8, 0)})
CPU = ("CPU", "model name : plain CPU\nflags : avx2")
TPU = ("TPU", {})


@pytest.fixture(autouse=True)
def disabled_afterwards():
    yield
    tfamp.disable()


@pytest.fixture
def devices(monkeypatch):
    """Returns a function that makes the host look as if it had these devices."""

    def pretend(*found):
        def listed(kind=None):
            return [each for each in found if kind in (None, each[0])]

        config, read = tf.config, pathlib.Path.read_text
        info = next((text for kind, text in found if kind == "CPU"), "")

        def read_text(path, *args):
            return info if str(path) == "/proc/cpuinfo" else read(path, *args)

        monkeypatch.setattr(config, "get_visible_devices", listed)
        monkeypatch.setattr(config.experimental, "get_device_details", lambda d: d[1])
        monkeypatch.setattr(pathlib.Path, "read_text", read_text)

    return pretend


def globals_now():
    """What `enable` may change: policy, TF32 and the methods of Keras' models."""
    return (
        keras.config.dtype_policy(),
        tf.config.experimental.tensor_float_32_execution_enabled(),
        keras.Model.compile,
        keras.Model.make_train_function,
    )


def dense_model(**keywords):
    layers = [keras.Input((4,)), keras.layers.Dense(8, **keywords)]
    return keras.Sequential([*layers, keras.layers.Dense(1, dtype="float32")])


def compiled(**keywords):
    model = dense_model(**keywords)
    model.compile("adam", "mse")
    return model


def scales(model):
    return isinstance(model.optimizer, tfamp.LossScaleOptimizer)


def fit(model):
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    return model.fit(x, x[:, :1], batch_size=8, verbose=0).history["loss"]


@pytest.mark.parametrize(
    ("found", "expected", "phrase"),
    [
        ([V100, CPU], "mixed_float16", "float16 tensor cores"),
        ([A100, CPU], "mixed_bfloat16", "bfloat16 tensor cores"),
        ([CPU], "float32", "no native bfloat16"),
        ([TPU, CPU], "mixed_bfloat16", "TPU"),
        ([], "float32", "no device"),
    ],
    ids=["V100", "A100", "CPU", "TPU", "none"],
)
def test_auto_sets_the_mode_for_the_device_and_says_why(
    devices, found, expected, phrase
):
    devices(*found)
    status = tfamp.enable()
    assert (status.requested, status.effective) == ("auto", expected)
    assert phrase in status.reason
    assert keras.config.dtype_policy().name == expected
    assert all(str(value) in str(status) for value in status)


@pytest.mark.parametrize("mode", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_disable_restores_exactly_and_is_idempotent(mode):
    before = globals_now()
    tfamp.enable(mode)
    tfamp.enable("mixed_bfloat16")
    tfamp.disable()
    assert globals_now() == before
    tfamp.disable()
    assert tfamp.status().requested is None


def test_plain_compile_trains_with_our_optimizer_under_mixed_float16():
    tfamp.enable("mixed_float16", loss_scale={"growth_interval": 2})
    model = compiled()
    losses = fit(model)
    assert type(model.optimizer) is tfamp.LossScaleOptimizer
    assert model.optimizer.growth_interval == 2
    assert np.isfinite(losses).all()
    assert float(model.optimizer.loss_scale) > 1


def test_stock_loss_scale_optimizer_is_left_alone():
    tfamp.enable("mixed_float16")
    model = dense_model()
    stock = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    model.compile(stock, "mse")
    assert model.optimizer is stock
    assert type(stock.inner_optimizer) is keras.optimizers.Adam


@pytest.mark.parametrize(
    ("mode", "layer_dtype", "scaled"),
    [
        ("mixed_float16", None, True),
        ("mixed_bfloat16", None, False),
        ("mixed_bfloat16", "mixed_float16", True),
        ("float32", "mixed_float16", True),
        ("float32", None, False),
    ],
)
def test_scaling_goes_where_a_float16_layer_trains(mode, layer_dtype, scaled):
    tfamp.enable(mode)
    assert scales(compiled(dtype=layer_dtype)) == scaled


@pytest.mark.parametrize("kind", ["nested", "wrapped", "map"])
def test_scaling_finds_layers(kind):
    """Stock Keras looks for a policy named mixed_float16; a map has another name."""
    tfamp.enable("float32")
    half = keras.layers.Dense(2, dtype="mixed_float16")
    if kind == "nested":
        inner = [keras.Input((4,)), dense_model(dtype="mixed_float16")]
    elif kind == "wrapped":
        each = keras.layers.TimeDistributed(half, dtype="float32")
        inner = [keras.Input((3, 4)), each]
    else:
        policies = keras.dtype_policies.DTypePolicyMap("mixed_float16")
        policies[".*head"] = keras.dtype_policies.DTypePolicy("float32")
        with tfamp.policy_scope("float32"):
            keras.config.set_dtype_policy(policies)
            names = ["body", "head"]
            inner = [keras.layers.Dense(1, name=name) for name in names]
            inner = [keras.Sequential([keras.Input((4,)), *inner])]
        assert inner[0].get_layer("body").compute_dtype == "float16"
    model = keras.Sequential(inner)
    model.compile("adam", "mse")
    assert scales(model)


def test_settings_are_copied_from_the_callers_dict():
    settings = {"growth_interval": 3}
    tfamp.enable("mixed_float16", loss_scale=settings)
    settings["growth_interval"] = -1
    assert compiled().optimizer.growth_interval == 3
    assert "dynamic" in tfamp.status().loss_scaling


def test_loss_scale_false_turns_all_scaling_off():
    tfamp.enable("mixed_float16", loss_scale=False)
    assert type(compiled().optimizer) is keras.optimizers.Adam


def test_saved_model_of_an_unchanged_script_goes_on_after_disable(tmp_path):
    tfamp.enable("mixed_float16", loss_scale={"growth_interval": 3})
    model = compiled()
    fit(model)
    model.save(tmp_path / "model.keras")
    tfamp.disable()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is tfamp.LossScaleOptimizer
    assert float(loaded.optimizer.loss_scale) == float(model.optimizer.loss_scale)
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations)
    np.testing.assert_allclose(fit(loaded), fit(model), rtol=1e-6)


@pytest.mark.parametrize(
    ("keywords", "error", "phrase"),
    [
        ({"mode": "mixed_fp16"}, ValueError, "mixed_float16"),
        ({"loss_scale": {"initial_scale": -1}}, ValueError, "initial_scale=-1"),
        ({"loss_scale": {"init": 1}}, TypeError, "'init'. Expected some of initial_"),
        ({"graph_rewrite": {"level": 1}}, TypeError, "'level'. Expected some of allow"),
        ({"graph_rewrite": {"denylist_add": 3}}, TypeError, "denylist_add=3"),
        ({"loss_scale": True}, TypeError, "loss_scale=True"),
        ({"on_unsupported": "ignore"}, ValueError, "ignore"),
        ({"fused_kernels": "yes"}, TypeError, "fused_kernels='yes'"),
    ],
    ids=str,
)
def test_bad_arguments_change_nothing(keywords, error, phrase):
    before = globals_now()
    with pytest.raises(error, match=phrase):
        tfamp.enable(**keywords)
    assert globals_now() == before
    assert tfamp.status().requested is None


def test_unsupported_mode_raises_or_falls_back_with_the_reason(devices):
    devices(TPU)
    with pytest.raises(tfamp.UnsupportedModeError, match="TPUs have no float16"):
        tfamp.enable("mixed_float16")
    with pytest.warns(UserWarning, match="TPUs have no float16"):
        status = tfamp.enable("mixed_float16", on_unsupported="warn")
    assert (status.requested, status.effective) == ("mixed_float16", "mixed_bfloat16")
    assert "TPUs have no float16" in status.reason
    devices(CPU)
    with pytest.warns(UserWarning, match="float32 is the nearest"):
        assert tfamp.enable("tf32", on_unsupported="warn").effective == "float32"


def test_other_keras_backend_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(tfamp.UnsupportedModeError, match="KERAS_BACKEND=tensorflow"):
        tfamp.enable()


def test_status_tells_of_a_policy_changed_after_enable():
    tfamp.enable("mixed_bfloat16")
    keras.config.set_dtype_policy("float32")
    status = tfamp.status()
    assert status.requested == "mixed_bfloat16"
    assert status.effective == "float32"
    assert "changed from mixed_bfloat16 to float32" in status.reason


def test_enable_again_replaces_and_disable_returns_to_the_first_state():
    before = globals_now()
    tfamp.enable("mixed_float16", loss_scale={"growth_interval": 5})
    tfamp.enable("mixed_float16", loss_scale={"growth_interval": 7})
    assert compiled().optimizer.growth_interval == 7
    with pytest.raises(ValueError, match="growth_interval"):
        tfamp.enable("mixed_bfloat16", loss_scale={"growth_interval": 0})
    assert tfamp.status().effective == "mixed_float16"
    tfamp.disable()
    assert globals_now() == before


# ---- Where loss scaling applies ----


def test_model_built_under_one_policy_and_compiled_under_another():
    tfamp.enable("mixed_float16")
    model = dense_model()
    tfamp.enable("float32")
    model.compile("adam", "mse")
    assert scales(model)


def test_float16_graph_rewrite_gets_loss_scaling_without_a_float16_layer(monkeypatch):
    options = {"auto_mixed_precision": True}
    monkeypatch.setattr(
        tf.config.optimizer, "get_experimental_options", lambda: options
    )
    tfamp.enable("float32")
    model = compiled()
    assert scales(model)
    options["auto_mixed_precision"] = False
    model.compile("adam", "mse")
    assert type(model.optimizer) is keras.optimizers.Adam


class OwnCompile(keras.Model):
    """Passes its optimizer on, as the Keras documentation does."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, dtype="mixed_float16", name="inner")

    def call(self, inputs):
        return self.dense(inputs)

    def compile(self, optimizer, factor, **keywords):
        super().compile(optimizer=optimizer, loss="mse", **keywords)
        self.factor = factor


class OwnOptimizers(OwnCompile):
    """Keeps its optimizers to itself, as the GAN examples do."""

    def compile(self, first, second):
        super().compile(None, 1.0)
        self.first_optimizer, self.others = first, [second]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.cast(self(x), tf.float32) - y)
        weights = self.trainable_variables
        self.first_optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def test_own_compile_that_passes_the_optimizer_on_is_scaled():
    tfamp.enable("float32")
    model = OwnCompile()
    model.compile("adam", factor=2.0)
    assert scales(model)
    assert np.isfinite(fit(model)).all()


def test_own_compile_that_keeps_its_optimizers_is_warned_about_with_names():
    tfamp.enable("float32")
    model = OwnOptimizers()
    model.compile(keras.optimizers.SGD(), keras.optimizers.Adam(name="second"))
    with pytest.warns(UserWarning, match="without loss scaling") as caught:
        fit(model)
    (message,) = [str(w.message) for w in caught if "loss scaling" in str(w.message)]
    assert "inner" in message and "others (second)" in message
    assert "first_optimizer (sgd" in message
    assert "tfamp.wrap_optimizer" in message


class LateLayers(keras.Model):
    """Creates its float16 layer after `compile`, in its `build`."""

    def build(self, shape):
        self.dense = keras.layers.Dense(1, dtype="mixed_float16", name="late")
        self.dense.build(shape)
        self.built = True

    def call(self, inputs):
        return self.dense(inputs)


def test_float16_layer_created_after_compile_is_warned_about():
    tfamp.enable("float32")
    model = LateLayers()
    model.compile("adam", "mse")
    with pytest.warns(UserWarning, match="late"):
        fit(model)


@pytest.mark.parametrize("how", ["auto_scale_loss", "loss_scale"])
def test_unscaled_float16_is_warned_about_unless_it_was_asked_for(how, recwarn):
    tfamp.enable("mixed_float16", loss_scale=False if how == "loss_scale" else None)
    model = dense_model()
    model.compile("adam", "mse", auto_scale_loss=how == "loss_scale")
    fit(model)
    told = [w for w in recwarn if "without loss scaling" in str(w.message)]
    assert len(told) == (1 if how == "auto_scale_loss" else 0)


@pytest.mark.parametrize("mode", ["float32", "mixed_float16"])
def test_what_needs_no_warning_gets_none(mode):
    tfamp.enable(mode)
    model = compiled()
    fit(model)  # Warnings are errors.
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse")
    fit(model)
