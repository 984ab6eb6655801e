"""enable, disable, status, and what they do to an unchanged Keras script."""

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

pytestmark = pytest.mark.usefixtures("disabled")

BF16, F16 = "mixed_bfloat16", "mixed_float16"


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


# ---- Before and after ----


def test_enable_again_replaces_and_disable_returns_to_the_first_state():
    before = helpers.read_globals()
    keywords = {"growth_interval": 5}
    tfamp.enable(F16, loss_scale=keywords)
    keywords["growth_interval"] = -1  # The dict is copied.
    assert compiled().optimizer.growth_interval == 5
    tfamp.enable(F16, loss_scale={"growth_interval": 7})
    assert compiled().optimizer.growth_interval == 7
    assert "dynamic" in tfamp.status().loss_scaling
    status = tfamp.enable("float32")
    assert (status.requested, status.effective) == ("float32", "float32")
    assert all(str(value) in status.full() for value in status)
    for _ in range(2):
        tfamp.disable()
        assert helpers.find_leaks(before, helpers.read_globals()) == []
        assert tfamp.status().requested is None


@pytest.mark.parametrize(
    ("keywords", "error", "phrase"),
    [
        ({"mode": "mixed_fp16"}, ValueError, "mixed_float16"),
        ({"loss_scale": {"initial_scale": -1}}, ValueError, "initial_scale=-1"),
        ({"loss_scale": {"init": 1}}, TypeError, "'init'. Expected some of initial_"),
        ({"loss_scale": True}, TypeError, "loss_scale=True"),
        ({"on_unsupported": "ignore"}, ValueError, "ignore"),
        ({"fused_kernels": "yes"}, TypeError, "fused_kernels='yes'"),
        ({"heal": None}, TypeError, "`heal` must be True or False. Received: heal=Non"),
        ({"graph_rewrite": 1}, TypeError, "a dict of keywords of `enable_graph_rewr"),
        ({"optimizer_state": "4bit"}, ValueError, "state must be one of .*'4bit'"),
        ({"weights": "float16"}, ValueError, "'float32' or 'bfloat16'. Received: wei"),
    ],
    ids=str,
)
@pytest.mark.parametrize("enabled", [False, True], ids=["off", "on"])
def test_bad_arguments_change_nothing(keywords, error, phrase, enabled):
    if enabled:
        tfamp.enable(F16)
    before = helpers.read_globals(), tfamp.status()
    with pytest.raises(error, match=phrase):
        tfamp.enable(**keywords)
    assert helpers.find_leaks(before[0], helpers.read_globals()) == []
    assert tfamp.status() == before[1]


def test_a_status_is_short_and_full_where_it_is_asked_for():
    tfamp.disable()
    status = tfamp.enable("float32")
    lines = str(status).splitlines()
    names = [line.split(":")[0] for line in lines]
    names = [name for name in names if name != "versions"]  # Of a release without one.
    assert names == ["effective", "reason", "device", "all settings"]
    assert repr(status) == str(status) and "float32" in lines[0]
    assert len(status.full().splitlines()) == len(status)
    odd = status._replace(
        healed="'large' (up to 1e+06)",
        versions="TensorFlow 3.0, Keras 4.0: untested; tested are others",
        xla="flags: --a (no longer in XLA_FLAGS); programs on disk: none",
    )
    *_, healed, versions, last = str(odd).splitlines()
    assert healed.startswith("healed:") and "'large'" in healed
    assert versions.startswith("versions:") and len(str(odd).splitlines()) == 6
    assert last == "1 more, and all settings: print(tfamp.status().full())"


def test_status_tells_of_what_was_changed_after_enable():
    tfamp.enable(BF16)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    assert "TF32 flag was changed" in tfamp.status().reason
    keras.config.set_dtype_policy("float32")
    status = tfamp.status()
    assert (status.requested, status.effective) == (BF16, "float32")
    assert "changed from mixed_bfloat16 to float32" in status.reason


# ---- Where loss scaling applies ----


@pytest.mark.parametrize(
    ("mode", "layer_dtype", "scaled"),
    [
        (F16, None, True),
        (BF16, None, False),
        (BF16, F16, True),
        ("float32", F16, True),
        ("float32", None, False),
    ],
)
def test_scaling_goes_where_a_float16_layer_trains(mode, layer_dtype, scaled):
    tfamp.enable(mode)
    assert scales(compiled(dtype=layer_dtype)) == scaled


def nested():
    return keras.Input((4,)), dense_model(dtype=F16)


def wrapped():
    half = keras.layers.Dense(2, dtype=F16)
    return keras.Input((3, 4)), keras.layers.TimeDistributed(half, dtype="float32")


def by_a_map():
    """Stock Keras looks for a policy named mixed_float16; a map has another name."""
    policies = keras.dtype_policies.DTypePolicyMap(F16)
    policies[".*head"] = keras.dtype_policies.DTypePolicy("float32")
    with tfamp.policy_scope("float32"):
        keras.config.set_dtype_policy(policies)
        layers = [keras.layers.Dense(1, name=name) for name in ("body", "head")]
        model = keras.Sequential([keras.Input((4,)), *layers])
    assert layers[0].compute_dtype == "float16"
    return (model,)


@pytest.mark.issue("tensorflow#47884")
@pytest.mark.parametrize("parts", [nested, wrapped, by_a_map])
def test_scaling_finds_layers(parts):
    tfamp.enable("float32")
    model = keras.Sequential(parts())
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
        self.dense = keras.layers.Dense(1, dtype=F16, name="inner")

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


@pytest.mark.issue("tensorflow#49368")
def test_own_compile_that_keeps_its_optimizers_is_warned_about_with_names():
    tfamp.enable("float32")
    model = OwnOptimizers()
    model.compile(keras.optimizers.SGD(), keras.optimizers.Adam(name="second"))
    with pytest.warns(UserWarning, match="without loss scaling") as caught:
        fit(model)
    (message,) = [str(w.message) for w in caught if "loss scaling" in str(w.message)]
    assert "inner" in message and "others (second)" in message
    assert "first_optimizer (sgd" in message.lower()
    assert "tfamp.wrap_optimizer" in message


def test_unscaled_float16_is_warned_about_unless_it_was_asked_for():
    tfamp.enable(F16, loss_scale=False)
    model = compiled()
    assert type(model.optimizer) is keras.optimizers.Adam
    fit(model)  # Warnings are errors.
    tfamp.enable(F16)
    model = compiled()
    model.compile("adam", "mse", auto_scale_loss=False)
    with pytest.warns(UserWarning, match="without loss scaling"):
        fit(model)
    assert type(model.optimizer) is keras.optimizers.Adam


@pytest.mark.parametrize("mode", ["float32", F16])
def test_what_needs_no_warning_gets_none_and_stays_as_it_is(mode):
    tfamp.enable(mode)
    model = compiled()
    fit(model)
    stock = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    model.compile(stock, "mse")
    fit(model)
    assert model.optimizer is stock
    assert type(stock.inner_optimizer) is keras.optimizers.SGD


def test_a_model_of_a_policy_that_was_reset_is_reported():
    with helpers.enabled("mixed_bfloat16"):
        keras.utils.clear_session()
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="own")])
        with pytest.warns(UserWarning, match="clear_session.*tfamp.enable"):
            model.compile("sgd", "mse")
        tfamp.enable("mixed_bfloat16")
        assert keras.layers.Dense(8).compute_dtype == "bfloat16"
