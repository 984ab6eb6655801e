"""What runs as few programs on a GPU: the same training, here on a CPU as if on one."""

import warnings

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

L, OPT = keras.layers, keras.optimizers
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 6)).astype("float32"), np.ones((24, 2), "float32")
IDS = np.asarray([[1, 2, 1, 3], [3, 3, 0, 1]] * 12, "int32")


def dense():
    inputs = keras.Input((6,))
    x = L.LayerNormalization()(L.Dense(8, "gelu")(L.BatchNormalization()(inputs)))
    return keras.Model(inputs, L.Dense(2)(x))


def trained(optimizer, build=dense, x=X, y=Y, batch=8, steps=6):
    """Weights, the optimizer's state and the logs of a fit of batches of one size."""
    keras.utils.set_random_seed(0)
    model = build()
    scores = {} if build is adversarial else {"loss": "mse", "metrics": ["mae"]}
    model.compile(optimizer, **scores, jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices((x, y))
    data = data.batch(batch, drop_remainder=True).repeat()
    logs = model.fit(data, steps_per_epoch=steps, verbose=0, shuffle=False).history
    state = [np.asarray(v.value, "float64") for v in model.optimizer.variables]
    return [np.asarray(w, "float64") for w in model.get_weights()], state, logs


def check_same(found, expected, rtol=2e-5):
    for got, want in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
        scale = np.abs(want).max() if want.size else 0
        # Those of biases before a normalization are rounding errors alone.
        np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol * max(scale, 0.01))
    for name, values in expected[2].items():
        np.testing.assert_allclose(found[2][name], values, rtol=rtol)


def on_both(optimizer, *given, **keywords):
    """Of Keras on a CPU, and as if on a GPU: what `trained` returns."""
    expected = trained(optimizer(), *given, **keywords)
    with helpers.as_if_on_a_gpu("float32", fused_kernels=True):
        found = trained(optimizer(), *given, **keywords)
        assert "the last update" not in tfamp.status().fused_kernels
    return found, expected


def embedding():
    inputs = keras.Input((4,), dtype="int32")
    x = L.GlobalAveragePooling1D()(L.Embedding(5, 8)(inputs))
    return keras.Model(inputs, L.Dense(2)(x))


SCHEDULE = OPT.schedules.CosineDecay(0.05, 10)
OPTIMIZERS = {
    "SGD": lambda: OPT.SGD(0.05),
    "Nesterov": lambda: OPT.SGD(0.05, momentum=0.9, nesterov=True, clipvalue=0.1),
    "Adam": lambda: OPT.Adam(0.01, amsgrad=True, epsilon=1e-3, clipnorm=0.3),
    "AdamW": lambda: OPT.AdamW(SCHEDULE, epsilon=1e-3, global_clipnorm=0.5),
    "Adamax": lambda: OPT.Adamax(0.01, epsilon=1e-3),
    "Nadam": lambda: OPT.Nadam(0.01, epsilon=1e-3),
    "Lamb": lambda: OPT.Lamb(0.01, epsilon=1e-3),
    "Lion": lambda: OPT.Lion(1e-4),
    "RMSprop": lambda: OPT.RMSprop(0.01, centered=True, momentum=0.9, epsilon=1e-2),
    "Adagrad": lambda: OPT.Adagrad(0.05),
    "Adadelta": lambda: OPT.Adadelta(0.5, epsilon=1e-3),
    "Adafactor": lambda: OPT.Adafactor(0.01),
    "Ftrl": lambda: OPT.Ftrl(0.05),
    "averages": lambda: OPT.SGD(0.05, use_ema=True, ema_overwrite_frequency=3),
    "accumulation": lambda: OPT.SGD(0.05, gradient_accumulation_steps=2, clipnorm=0.5),
    "averaged": lambda: OPT.SGD(0.05, gradient_accumulation_steps=3, use_ema=True),
}
if hasattr(OPT, "Muon") and keras.__version__ >= "3.15":  # That of 3.10 fails in a fit.
    OPTIMIZERS["Muon"] = lambda: OPT.Muon(0.01)
if hasattr(OPT, "ScheduleFreeAdamW"):
    OPTIMIZERS["ScheduleFreeAdamW"] = lambda: OPT.ScheduleFreeAdamW(0.01, epsilon=1e-3)


# Of an embedding: those that treat its rows apart, or look at whole matrices.
ROWS = "Nesterov", "AdamW", "Adafactor", "Muon", "averages", "accumulation"
OTHERS = sorted(OPTIMIZERS.keys() - {"AdamW", "SGD", "Adafactor", "accumulation"})


@pytest.mark.parametrize(
    ("build", "name"),
    [(embedding, "Adagrad")]
    + helpers.whole_runs(
        (dense, x) for x in ("AdamW", "SGD", "Adafactor", "accumulation")
    )
    + helpers.whole_runs(((dense, x) for x in OTHERS), pytest.mark.slow)
    + helpers.whole_runs(
        ((embedding, x) for x in ROWS if x in OPTIMIZERS), pytest.mark.slow
    ),
)
def test_every_stock_optimizer_trains_as_keras_has_it(build, name):
    both = on_both(OPTIMIZERS[name], build, IDS if build is embedding else X)
    check_same(*both, 2e-4 if name == "Muon" else 2e-5)


@pytest.mark.parametrize(
    "name",
    helpers.names_of(["AdamW", "SGD", "accumulation", "averages"], quick=["AdamW"]),
)
@pytest.mark.parametrize("build", helpers.names_of([dense, embedding], [dense]))
def test_a_scaled_update_is_the_same_and_a_skipped_one_changes_nothing(name, build):
    x = IDS if build is embedding else X
    y = Y.copy()
    y[8:16] = np.inf  # The second batch of three.

    def scaled():
        return tfamp.LossScaleOptimizer(OPTIMIZERS[name](), initial_scale=2.0**10)

    with warnings.catch_warnings(action="ignore"):  # Of the infinite batch.
        found, expected = on_both(scaled, build, x, y, steps=8)
    check_same(found, expected)
    assert 3.0 in found[1]  # Steps that were skipped.


# ---- The small operators of a step ----


class Adversarial(keras.Model):
    """Two networks and two updates in a step; the second sees what the first wrote."""

    def __init__(self):
        super().__init__()
        self.maker, self.judge = L.Dense(6), L.Dense(1)
        self.other = OPT.SGD(0.1, momentum=0.5)
        self.seen = self.add_weight(shape=(6,), name="seen", trainable=False)

    def call(self, x):
        self.seen.assign(0.9 * self.seen + 0.1 * tf.reduce_mean(x, 0))
        return self.judge(self.maker(x) + self.seen)

    def train_step(self, data):
        x, _ = data
        turns = (self.judge, self.other), (self.maker, self.optimizer)
        for layer, optimizer in turns:
            with tf.GradientTape() as tape:
                score = tf.nn.softplus(tf.sin(self(x, training=True)))
                loss = tf.reduce_mean(score * tf.exp(-tf.square(score)))
            wanted = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, wanted), wanted)
        return {"loss": loss, "mae": tf.reduce_max(score)}


def adversarial():
    model = Adversarial()
    model(X)
    model.other.build(model.judge.trainable_variables)
    return model


class Loops(L.Layer):
    """Branches, loops and integers in a user's layer."""

    def call(self, x):
        turn = tf.reduce_sum(tf.cast(x > 0, tf.int32), 1, keepdims=True)
        turned = x * tf.tanh(tf.cast(turn, x.dtype))
        x = tf.cond(tf.reduce_sum(x) > 0, lambda: turned, lambda: -x)
        _, x = tf.while_loop(
            lambda i, x: i < 3, lambda i, x: (i + 1, tf.sin(x) + x), (0, x)
        )
        kept = tf.random.stateless_uniform(tf.shape(x), (1, 2)) < 0.7
        return tf.where(kept, x, 0.0)


def convolutions():
    inputs = keras.Input((6,))
    x = L.Reshape((6, 1))(Loops()(inputs))
    for _ in range(2):
        x = L.BatchNormalization()(L.Conv1D(4, 3, padding="same")(x))
        x = L.MaxPooling1D()(L.Activation("swish")(x))
    return keras.Model(inputs, L.Dense(2)(L.Flatten()(x)))


def attention():
    inputs = keras.Input((6,))
    x = L.Dense(8)(L.Reshape((6, 1))(inputs))
    mask = np.tril(np.ones((6, 6), "bool"))
    x += L.MultiHeadAttention(2, 4)(x, x, attention_mask=mask[None])
    x = L.GlobalAveragePooling1D()(L.LayerNormalization()(x))
    return keras.Model(inputs, L.Dense(2)(x))


class Open(L.Layer):
    """Sizes that only the values tell, int64 ones among them, and dropout of them."""

    def __init__(self):
        super().__init__()
        self.dense = L.Dense(4, "gelu")
        self.normal, self.noise = L.LayerNormalization(), L.Dropout(1e-3)
        self.count = self.add_weight(name="count", dtype="int64", trainable=False)

    def build(self, shape):
        self.dense.build(shape)
        self.normal.build((None, 4))

    def call(self, x, training=False):
        seen = tf.boolean_mask(x, x[:, 0] < 1e6)
        seen = self.normal(self.noise(self.dense(seen), training=training))
        last = tf.cast(tf.shape(x)[0], tf.int64) - 1 + self.count
        filled = tf.fill([last + 1, tf.constant(4, tf.int64)], 0.5)
        return tf.reshape(seen, [-1, 4]) + filled + x[last, 1] * 0.1


def open_sizes():
    inputs = keras.Input((6,))
    return keras.Model(inputs, L.Dense(2)(Open()(inputs)))


def test_sizes_that_only_values_tell_are_left_to_tensorflow():
    found, expected = on_both(lambda: OPT.SGD(0.05), open_sizes)
    # One element of a thousand is dropped, others than Keras drops.
    np.testing.assert_allclose(found[2]["loss"], expected[2]["loss"], rtol=0.05)


@pytest.mark.parametrize(
    "build",
    helpers.names_of([adversarial, convolutions, attention], [adversarial, attention]),
)
def test_a_step_of_programs_computes_what_its_operators_did(build):
    check_same(*on_both(lambda: OPT.SGD(0.05, momentum=0.9), build), 1e-4)


@pytest.mark.device
@pytest.mark.parametrize(
    "mode",
    helpers.names_of(["tf32", "mixed_bfloat16", "mixed_float16"], ["mixed_bfloat16"]),
)
def test_the_modes_of_a_gpu_have_them(mode):
    with helpers.as_if_on_a_gpu(mode) as status:
        assert "small operators" in status.fused_kernels
        *_, logs = trained(OPT.SGD(0.05), attention)
    with helpers.as_if_on_a_gpu(mode, fused_kernels=False) as status:
        assert status.fused_kernels == "off"
        *_, expected = trained(OPT.SGD(0.05), attention)
    np.testing.assert_allclose(logs["loss"], expected["loss"], rtol=0.02)


class Look(L.Layer):
    """Notes the sizes that it is traced for."""

    traced: list = []

    def call(self, x):
        if not tf.executing_eagerly():
            Look.traced.append(x.shape[0])
        return x


@pytest.mark.parametrize("jit_compile", helpers.names_of([False, True], [False]))
def test_arrays_have_programs_for_whole_batches_and_the_rest_is_computed_alike(
    jit_compile,
):
    def fit():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        hidden = L.Dense(8, "gelu")(Look()(L.BatchNormalization()(inputs)))
        model = keras.Model(inputs, L.Dense(2)(hidden))
        model.compile(OPT.SGD(0.1), "mse", metrics=["mae"], jit_compile=jit_compile)
        Look.traced.clear()
        validation = {"validation_data": (X, Y), "validation_batch_size": 10}
        logs = model.fit(X, Y, 10, 3, 0, shuffle=False, **validation).history
        traced = list(Look.traced)
        return logs, traced, model.predict(X, batch_size=10, verbose=0)

    expected, _, outputs = fit()
    with helpers.as_if_on_a_gpu("float32", fused_kernels=True):
        logs, traced, found = fit()
    assert {10, None} <= {*traced} <= {10, 24, None}
    for name, values in expected.items():
        np.testing.assert_allclose(logs[name], values, rtol=2e-5)
    np.testing.assert_allclose(found, outputs, rtol=1e-4, atol=1e-5)


def test_of_lengths_that_vary_the_first_has_programs():
    lengths = 5, 9, 7, 12, 6, 8

    def fit():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((None, 6))
        hidden = L.GlobalAveragePooling1D()(Look()(L.Dense(8, "gelu")(inputs)))
        model = keras.Model(inputs, L.Dense(2)(hidden))
        model.compile(OPT.SGD(0.1), "mse", jit_compile=False)
        Look.traced.clear()
        batches = [(np.repeat(X[:8, None], n, 1), Y[:8]) for n in lengths]
        specs = tf.TensorSpec([None, None, 6]), tf.TensorSpec([None, 2])
        data = tf.data.Dataset.from_generator(lambda: batches, output_signature=specs)
        data = data.apply(tf.data.experimental.assert_cardinality(len(lengths)))
        logs = model.fit(data, epochs=2, verbose=0, shuffle=False).history
        return logs["loss"], list(Look.traced)

    expected, _ = fit()
    with helpers.as_if_on_a_gpu("float32", fused_kernels=True):
        losses, traced = fit()
    assert 8 in traced and len(traced) < len(lengths)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)


def test_images_stay_channels_last_in_tf32():
    options = tf.config.optimizer

    def layout():
        return options.get_experimental_options().get("layout_optimizer")

    for mode, fused, expected in (
        ("tf32", None, False),
        ("tf32", False, None),
        ("mixed_bfloat16", None, None),
        ("float32", True, None),  # Without TF32 they are faster channels first.
    ):
        with helpers.as_if_on_a_gpu(mode, fused_kernels=fused):
            assert layout() is expected, mode
            told = "stay channels last" in tfamp.status().fused_kernels
            assert told is (expected is False), mode
        assert layout() is None
    options.set_experimental_options({"layout_optimizer": True})
    with helpers.as_if_on_a_gpu("tf32"):
        assert layout() is True
    assert layout() is True
    options.set_experimental_options({"layout_optimizer": None})
