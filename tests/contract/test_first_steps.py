"""float16 begins with the right scale, heals itself, and keeps raw values.

The first steps of a `fit` are taken again until they fit; layers that overflow are set
to float32; what computes with raw inputs, and sums that make a loss, are float32.
"""

import re
import warnings

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
import workers

import tfamp

pytestmark = pytest.mark.usefixtures("disabled")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(256, 16)).astype("float32")
Y = X[:, :1]
layers = keras.layers


# ---- The first steps ----


def summed(factor):
    def loss(y, predicted):
        return factor * tf.reduce_sum((y - predicted) ** 2)

    return loss


def body():
    """Dropout, statistics and metrics: all that a step writes, and must be undone."""
    inner = [layers.Dense(32, "relu"), layers.BatchNormalization(), layers.Dropout(0.2)]
    return [keras.Input((16,)), *inner, layers.Dense(1)]


def in_fit(model):
    return model.fit(X, Y, batch_size=32, shuffle=False, verbose=0)


def by_batches(model):
    for start in range(0, len(X), 32):
        model.train_on_batch(X[start : start + 32], Y[start : start + 32])


class OwnStep(keras.Sequential):
    """A `train_step` that tfamp scales, with a variable of the user's own."""

    def __init__(self, *args):
        super().__init__(*args)
        self.count = tf.Variable(0)

    def train_step(self, data):
        x, y = data
        self.count.assign_add(1)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        weights = self.trainable_variables
        grads = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(grads, weights, strict=True))
        return self.compute_metrics(x, y, self(x))


# How a model is made, compiled and run.
RUNS = {
    "fit": (keras.Sequential, {}, {}, in_fit),
    "XLA": (keras.Sequential, {"jit_compile": True}, {}, in_fit),
    "several steps": (keras.Sequential, {"steps_per_execution": 4}, {}, in_fit),
    "eager": (keras.Sequential, {"run_eagerly": True}, {}, in_fit),
    "batches": (keras.Sequential, {}, {}, by_batches),
    "train_step": (OwnStep, {}, {}, in_fit),
    "accumulated": (keras.Sequential, {}, {"gradient_accumulation_steps": 2}, in_fit),
}


def trained(name, factor, initial_scale):
    make, compiling, of_optimizer, run = RUNS[name]
    keras.utils.set_random_seed(0)
    model = make(body())
    inner = keras.optimizers.Adam(1e-3, **of_optimizer)
    optimizer = tfamp.LossScaleOptimizer(inner, initial_scale)
    model.compile(optimizer, summed(factor), metrics=["mae"], **compiling)
    run(model)
    return model, optimizer


@pytest.mark.parametrize("name", helpers.names_of(RUNS, quick=["fit", "eager"]))
def test_weights_are_those_of_a_run_that_began_with_the_right_scale(name):
    tfamp.enable("mixed_float16")
    model, optimizer = trained(name, 1e4, 2.0**15)
    scale = float(optimizer.dynamic_scale)
    assert scale < 2.0**4
    assert int(optimizer.skipped_steps) == 0
    assert 0 < optimizer.retried_steps <= 16
    accumulated = "gradient_accumulation_steps" in RUNS[name][2]
    assert int(optimizer.iterations) == (4 if accumulated else 8)
    assert not hasattr(model, "count") or int(model.count) == 8
    other, plain = trained(name, 1e4, scale)
    assert plain.retried_steps == 0
    helpers.assert_equal(model.variables, other.variables)
    helpers.assert_equal(optimizer.variables, plain.variables)


@pytest.mark.parametrize("factor", helpers.names_of([1.0, 1e2, 1e4, 1e6], quick=[1e6]))
def test_no_batch_is_lost_and_the_scale_is_the_largest_that_fits(factor):
    tfamp.enable("mixed_float16")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(body())
    model.compile(keras.optimizers.Adam(1e-3), summed(factor))
    model.train_on_batch(X[:32], Y[:32])
    first = float(model.optimizer.dynamic_scale)
    by_batches(model)
    assert int(model.optimizer.skipped_steps) == 0
    _, twice = trained("batches", factor, 2 * first)
    assert twice.retried_steps or first == 2.0**15


def test_a_step_that_fits_is_taken_once_and_a_run_that_goes_on_is_not_retried():
    tfamp.enable("mixed_float16")
    model = keras.Sequential(body())
    helpers.fit(model, X, Y, "adam")
    assert model.optimizer.retried_steps == 0
    assert type(model.train_function).__name__ != "RetriedSteps"
    model.optimizer.dynamic_scale.assign(2.0**24)
    with pytest.warns(UserWarning, match="training steps of this epoch"):
        in_fit(model)
    assert model.optimizer.retried_steps == 0
    assert int(model.optimizer.skipped_steps) > 0


class Two(keras.Model):
    """Updates one network before the other one overflows."""

    def __init__(self, factor):
        super().__init__()
        self.factor, self.seed = factor, keras.random.SeedGenerator(1)
        self.maker = keras.Sequential([keras.Input((4,)), layers.Dense(16)])
        self.critic = keras.Sequential(body())
        self.optimizers = [keras.optimizers.Adam(1e-3) for _ in range(2)]

    def train_step(self, real):
        noise = keras.random.normal((32, 4), seed=self.seed)
        for network, sign, factor in (
            (self.critic, 1.0, 1.0),
            (self.maker, -1.0, self.factor),
        ):
            with tf.GradientTape() as tape:
                made = self.critic(self.maker(noise), training=True)
                real_loss = tf.nn.softplus(-self.critic(real, training=True))
                loss = tf.reduce_sum(tf.nn.softplus(sign * made) + real_loss) * factor
            weights = network.trainable_weights
            optimizer = self.optimizers[network is self.maker]
            grads = tape.gradient(loss, weights)
            optimizer.apply_gradients(zip(grads, weights, strict=True))
        return {"loss": loss}


def two(factor, **loss_scale):
    keras.utils.set_random_seed(0)
    with helpers.enabled("mixed_float16", loss_scale=loss_scale):
        model = Two(factor)
        model.compile()
        model.fit(X, batch_size=32, shuffle=False, verbose=0)
        return model, float(model.optimizer.dynamic_scale)


def test_a_network_that_was_updated_before_another_overflows_is_put_back():
    model, scale = two(1e5)
    assert [int(x.iterations) for x in model.optimizers] == [8, 8]
    assert int(model.optimizer.skipped_steps) == 0
    other, _ = two(1e5, initial_scale=scale)
    helpers.assert_equal(model.get_weights(), other.get_weights())


def replicas():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    tfamp.enable("mixed_float16")

    def run(initial_scale):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential(body())
            optimizer = tfamp.LossScaleOptimizer(keras.optimizers.Adam(), initial_scale)
            model.compile(optimizer, lambda y, p: 1e5 * (y - p) ** 2)
        model.fit(X, Y, batch_size=32, shuffle=False, verbose=0)
        return model.get_weights(), optimizer

    found, optimizer = run(2.0**15)
    wanted, _ = run(float(optimizer.dynamic_scale.numpy()))
    same = all(np.array_equal(*each) for each in zip(found, wanted, strict=True))
    skipped = int(optimizer.skipped_steps.numpy())
    return same, skipped, optimizer.retried_steps > 0, healed_over_replicas(strategy)


def healed_over_replicas(strategy):
    with strategy.scope(), warnings.catch_warnings(record=True) as caught:
        model = functional()
        helpers.fit(model, X, Y, keras.optimizers.Adam(1e-3))
    skipped = int(model.optimizer.skipped_steps.numpy())
    return skipped, any("'large'" in str(each.message) for each in caught)


@pytest.mark.training
def test_replicas_retry_and_heal_alike():
    (found,) = workers.run(replicas, workers=1, cpus=2, timeout=300)
    same, skipped, retried, healed = found
    assert same and retried and skipped == 0
    assert tuple(healed) == (0, True)


def test_sparse_batches_are_taken():
    tfamp.enable("mixed_float16")
    model = keras.Sequential([keras.Input((16,), sparse=True), layers.Dense(1)])
    model.compile("adam", "mse")
    model.train_on_batch(tf.sparse.from_dense(X[:32]), Y[:32])
    assert int(model.optimizer.iterations) == 1


def test_a_loss_that_overflows_outside_of_layers_is_not_blamed_on_data():
    class Squares(OwnStep):
        def compute_loss(self, x=None, y=None, y_pred=None, **_):
            return tf.cast(
                tf.reduce_mean(tf.cast(y_pred, "float16") * 6e4 * 6e4), "float32"
            )

    tfamp.enable("mixed_float16")
    said = "what computes the loss, which should be in float32|training steps of this"
    with pytest.warns(UserWarning, match=said):
        helpers.fit(Squares(body()), X, Y, "adam")


def test_data_are_drawn_once():
    tfamp.enable("mixed_float16")
    drawn = []

    def batches():
        while True:
            drawn.append(len(drawn))
            yield X[:32], Y[:32]

    model, steps = keras.Sequential(body()), {"steps_per_epoch": 6, "epochs": 2}
    helpers.fit(model, batches(), None, "adam", summed(1e4), shuffle=False, **steps)
    assert int(model.optimizer.iterations) == 12
    assert len(drawn) <= 14  # Keras looks at one, and prefetches.


# ---- Healing ----


def functional():
    inputs = keras.Input((16,))
    x = layers.Dense(16, "relu")(inputs)
    x = layers.Dense(16, name="large")(x * 4e4 * 4.0)  # Operators of no layer.
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(inputs, layers.Dense(1)(x))


class Times(layers.Layer):
    def call(self, x):
        return x * 4e4 * 4.0


def sequential():
    inner = [layers.Dense(16, "relu"), Times(name="large"), layers.LayerNormalization()]
    return keras.Sequential([keras.Input((16,)), *inner, layers.Dense(1)])


class Subclassed(keras.Model):
    """The model's own arithmetic overflows, between its layers."""

    def __init__(self):
        super().__init__()
        self.large, self.inner = layers.Dense(16, "relu", name="large"), layers.Dense(8)
        self.last = layers.Dense(1)

    def call(self, x):
        return self.last(self.inner(self.large(x) * 300.0 * 300.0) * 1e-5)


def nested():
    inner = keras.Sequential([keras.Input((16,)), layers.Dense(8), Times(name="large")])
    inputs = keras.Input((16,))
    x = layers.LayerNormalization()(inner(inputs))
    return keras.Model(inputs, layers.Dense(1)(x))


def attention():
    inputs = keras.Input((16,))
    x = layers.Reshape((4, 4))(inputs)
    x = Times(name="large")(layers.Dense(8)(x))
    x = layers.LayerNormalization()(layers.MultiHeadAttention(2, 4)(x, x))
    return keras.Model(inputs, layers.Dense(1)(layers.Flatten()(x)))


def recurrent():
    inputs = keras.Input((16,))
    x = Times(name="large")(layers.Dense(16)(inputs))
    x = layers.LSTM(8)(layers.Reshape((4, 4))(x))
    return keras.Model(inputs, layers.Dense(1)(x))


KINDS = [functional, sequential, Subclassed, nested, attention, recurrent]


def healed(model):
    """Names of the layers that are in float32 since they overflowed."""
    rows = tfamp.describe_layers(model)
    return {row.path.split("/")[-1] for row in rows if "healed" in row.reason}


def compared(make, x, y, rate=1e-3, loss="mse", epochs=2, **compiled):
    """Losses in float32; the model and its losses in float16; what was warned of."""
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", "Model .*beyond float16")  # Healed.
        for mode in ("float32", "mixed_float16"):
            keras.utils.set_random_seed(0)
            with helpers.enabled(mode):
                model, few = make(), {"shuffle": False, "epochs": epochs, **compiled}
                adam = keras.optimizers.Adam(rate)
                losses.append(helpers.fit(model, x, y, adam, loss, **few))
    assert int(model.optimizer.skipped_steps) == 0
    return *losses, model, helpers.warned(caught)


@pytest.mark.parametrize(
    "make", helpers.names_of(KINDS, quick=[functional], slow=[nested, recurrent])
)
def test_a_layer_that_overflows_is_healed_and_no_batch_is_lost(make):
    wanted, found, model, (text,) = compared(make, X, Y)
    np.testing.assert_allclose(found, wanted, rtol=0.1)
    assert "large'" in text and "overrides={" in text
    assert "large" in healed(model)
    assert np.isfinite(model.predict(X, verbose=0)).all()


def regularized():
    return stack(layers.Dense(16, "relu", kernel_regularizer="l2", name="first"))


def recurring():
    return stack(layers.Reshape((4, 4)), layers.SimpleRNN(16, "relu", name="first"))


def plain():
    return stack(layers.Dense(16, "relu", name="first"))


def stack(*inner):
    return keras.Sequential([keras.Input((16,)), *inner, layers.Dense(1)])


# As they are: the squared error has gradients beyond 1e10.
AREAS, PRICES = 5e3 * np.abs(X), 1e6 + 1e5 * Y


@pytest.mark.parametrize(
    ("make", "jit_compile"),
    [(plain, False), (plain, True), (regularized, False), (recurring, False)],
)
def test_gradients_that_fit_at_no_scale_are_float32(make, jit_compile):
    wanted, found, model, (text,) = compared(
        make, AREAS, PRICES, 0.1, jit_compile=jit_compile
    )
    assert re.search("gradients beyond float16.*first'", text)
    np.testing.assert_allclose(found, wanted, rtol=0.01)
    assert "first" in healed(model)


def test_an_epoch_that_skips_most_steps_is_healed():
    """Not eight in a row: some batches fit."""
    tfamp.enable("mixed_float16")
    keras.utils.set_random_seed(0)
    model = plain()
    model.compile(keras.optimizers.Adam(0.1), "mse")
    factors = np.where(np.arange(len(X)) // 32 % 4 == 0, 1e-2, 5e3)[:, None]
    x, few = factors * np.abs(X), {"batch_size": 32, "shuffle": False, "verbose": 0}
    model.fit(1e-2 * np.abs(X), PRICES, epochs=3, **few)  # Its first steps are over.
    said = "gradients beyond float16|numbers beyond float16|were skipped"
    with pytest.warns(UserWarning, match=said):
        model.fit(x, PRICES, epochs=6, **few)
    skipped = int(model.optimizer.skipped_steps)
    model.fit(x, PRICES, **few)
    assert int(model.optimizer.skipped_steps) == skipped
    assert healed(model)


def test_a_healed_run_loses_no_step_of_an_execution_and_goes_on_as_ever():
    tfamp.enable("mixed_float16")
    model = functional()
    model.compile(keras.optimizers.Adam(1e-3), "mse", steps_per_execution=8)
    few = {"batch_size": 8, "shuffle": False, "verbose": 0}
    with pytest.warns(UserWarning, match="beyond float16"):
        model.fit(X, Y, **few)
    optimizer = model.optimizer
    assert (int(optimizer.iterations), int(optimizer.skipped_steps)) == (32, 0)
    model.fit(X[:64], Y[:64], **few)
    assert type(model.train_function).__name__ != "RetriedSteps"


def test_gradients_that_are_nan_in_float32_too_heal_nothing():
    tfamp.enable("mixed_float16")
    model, targets = plain(), np.full_like(Y, 1e8)
    targets[::32] = np.nan
    said = "Precision is not the cause|steps of this epoch were skipped"
    with pytest.warns(UserWarning, match=said) as caught:
        helpers.fit(model, AREAS, targets, "adam", shuffle=False)
    text = "".join(helpers.warned(caught))
    assert "Precision is not the cause" in text and "They compute" not in text
    assert not healed(model)


class Trains(keras.Model):
    """A loss of its own, which asks whether it trains."""

    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(16, name="first"), layers.Dense(1)

    def call(self, x):
        return self.last(self.first(x))

    def compute_loss(self, x, y, y_pred, sample_weight, training):
        return tf.reduce_mean((y - y_pred) ** 2)


def test_a_loss_of_a_models_own_is_differentiated_as_keras_calls_it():
    tfamp.enable("mixed_float16")
    model = Trains()
    model.compile(keras.optimizers.Adam(0.1))
    with pytest.warns(UserWarning, match="gradients beyond float16.*first'"):
        model.fit(5e3 * np.abs(X), 1e6 + 1e5 * Y, batch_size=32, verbose=0)
    assert int(model.optimizer.skipped_steps) == 0


class Adversarial(keras.Model):
    """Has no `call`: what computes what is in its `train_step` only."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(0)
        self.generator = keras.Sequential([layers.Input((8,)), layers.Dense(16)])
        self.critic = keras.Sequential(
            [
                layers.Input((16,)),
                layers.Dense(16, "relu"),
                Times(name="large"),
                layers.LayerNormalization(),
                layers.Dense(1, name="score"),
            ]
        )
        self.steps = tf.Variable(0)

    def train_step(self, real):
        self.steps.assign_add(1)
        with tf.GradientTape() as tape:
            fake = self.generator(real[:, :8])
            scores = self.critic(fake) - self.critic(real)
            loss = tf.reduce_mean(tf.nn.softplus(scores))
        weights = self.critic.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def adversarial():
    model = Adversarial()
    model.compile(keras.optimizers.SGD(1e-2))
    return model, model.fit(X, batch_size=32, shuffle=False, verbose=0).history["loss"]


def test_a_model_without_a_call_is_healed_in_its_train_step():
    _, (expected,) = adversarial()
    tfamp.enable("mixed_float16")
    said = "/large' .*and the batch is taken again|does not hold"
    with pytest.warns(UserWarning, match=said):
        model, (loss,) = adversarial()
    assert int(model.steps) == int(model.optimizer.iterations) == 8
    assert loss == pytest.approx(expected, rel=0.05)


def test_what_is_healed_stays_so_and_is_listed(tmp_path):
    keras.backend.clear_session()  # Keras counts names: the paths of both are alike.
    tfamp.enable("mixed_float16")
    model = sequential()
    with pytest.warns(UserWarning, match="'.*/large'"):
        helpers.fit(model, X, Y, "adam")
    assert "large" in tfamp.status().healed
    helpers.fit(model, X, Y, "adam")  # A new plan.
    assert int(model.optimizer.skipped_steps) == 0
    assert model.layers[1].compute_dtype == "float32"
    tfamp.set_precision(model, "mixed_float16")
    assert model.layers[1].compute_dtype == "float32"
    wanted = model.predict(X, verbose=0)
    model.save(tmp_path / "model.keras")
    with keras.saving.custom_object_scope({"Times": Times}):
        loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), wanted)
    keras.backend.clear_session()
    same = sequential()
    same(X[:1])
    assert same.layers[1].path == model.layers[1].path
    assert "large" in tfamp.status().healed


def test_without_healing_it_is_said_and_nothing_is_changed():
    tfamp.enable("mixed_float16", heal=False)
    model = sequential()
    before = model.get_weights()
    said = "/large'.*heal=False|training steps of this epoch"
    with pytest.warns(UserWarning, match=said) as caught:
        helpers.fit(model, X, Y, "adam")
    assert "heal=False" in helpers.warned(caught)[0]
    helpers.assert_equal(model.get_weights(), before)
    assert model.layers[1].compute_dtype == "float16"


def test_a_run_is_healed_as_often_as_it_needs():
    """A series that grows: one layer after the other takes too large numbers."""
    level = np.linspace(2e4, 3e5, 256)[:, None]
    x = (level * RNG.uniform(0.9, 1.1, (256, 8))).astype("float32")

    def make():
        hidden = [layers.Dense(32, "relu") for _ in range(4)]
        return keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(1)])

    wanted, found, *_ = compared(make, x, level, 1e-4, "mae", 3)
    np.testing.assert_allclose(found, wanted, rtol=0.05)


def test_a_run_that_overflows_later_is_healed_between_epochs():
    tfamp.enable("mixed_float16")
    factor = tf.Variable(1.0)

    class Grows(layers.Layer):
        def call(self, x):
            return x * tf.cast(factor, x.dtype) * 16.0

    inner = [layers.Dense(16, "relu"), Grows(name="grows"), layers.LayerNormalization()]
    model = stack(*inner)
    helpers.fit(model, X, Y, "adam")
    factor.assign(6e4)
    said = "/grows'|training steps of this epoch"
    with pytest.warns(UserWarning, match=said) as caught:
        model.fit(X, Y, batch_size=16, epochs=3, verbose=0)
    assert "/grows'" in "".join(helpers.warned(caught))
    assert int(model.optimizer.skipped_steps) == 16  # One epoch.
    assert np.isfinite(model.evaluate(X, Y, verbose=0))


def spoiled(what):
    x, y = X.copy(), Y.copy()
    x[:32, 0] = what
    return x, y


BAD = {
    "NaN in x": ((spoiled(np.nan)), "x has 32 NaN"),
    "infinity in x": ((spoiled(np.inf)), "its largest number is inf"),
    "NaN in y": ((X, np.where(np.arange(256)[:, None] < 3, np.nan, Y)), "y has 3 NaN"),
}


@pytest.mark.parametrize(("data", "fact"), BAD.values(), ids=BAD)
def test_bad_data_are_said_and_neither_healed_nor_retried(data, fact):
    tfamp.enable("mixed_float16")
    model = keras.Sequential(body())
    with pytest.warns(UserWarning, match=f"infinite or NaN. .*{fact}"):
        helpers.fit(model, *data, "adam", shuffle=False)
    assert model.optimizer.retried_steps == 0
    assert int(model.optimizer.skipped_steps) == 1
    assert int(model.optimizer.iterations) == 7
    assert not healed(model)


def test_a_learning_rate_that_diverges_is_not_healed():
    tfamp.enable("mixed_float16")
    model = stack(layers.Dense(16))
    said = "training has diverged|training steps of this epoch"
    with pytest.warns(UserWarning, match=said) as caught:
        helpers.fit(model, X, Y, keras.optimizers.SGD(1e4), batch_size=16, epochs=4)
    assert "diverged" in "".join(helpers.warned(caught))
    assert not healed(model)


def test_nothing_is_healed_in_bfloat16():
    with helpers.enabled("mixed_bfloat16"):
        guard = tfamp.LossScaleOptimizer(keras.optimizers.Adam(), 1, dynamic=False)
        helpers.fit(sequential(), *spoiled(np.nan), guard, shuffle=False)
        assert int(guard.skipped_steps) == 1


# ---- Raw values, until the first product ----


def census():
    columns = [keras.Input((1,), name=name) for name in ("age", "weight")]
    x = layers.LayerNormalization(name="norm")(layers.Concatenate()(columns))
    return keras.Model(columns, layers.Dense(1)(layers.Dense(8, name="first")(x)))


class Cross(layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.dense = layers.Dense(units, name="product")

    def call(self, first, x):
        return first * self.dense(x) + x


class CrossNetwork(keras.Model):
    def __init__(self):
        super().__init__()
        self.crosses = [Cross(2), Cross(2)]
        self.norm, self.last = layers.BatchNormalization(name="norm"), layers.Dense(1)

    def call(self, columns, training=None):
        first = x = keras.ops.concatenate(columns, -1)
        for cross in self.crosses:
            x = cross(first, x)
        return self.last(self.norm(x, training=training))


def crossed():
    columns = [keras.Input((1,)) for _ in range(2)]
    first = x = layers.Concatenate()(columns)
    for name in ("product_1", "product_2"):
        x = first * layers.Dense(2, name=name)(x) + x
    x = layers.BatchNormalization(name="norm")(x)
    return keras.Model(columns, layers.Dense(1)(x))


def saturated():
    """Infinity is 1 after a tanh: the loss is finite, and no gradient is."""
    inputs = keras.Input((2,))
    x = layers.Dense(8, "tanh", name="product")(inputs)
    return keras.Model(inputs, layers.Dense(1)(x))


def masked():
    inputs = keras.Input((8, 1))
    x = layers.LSTM(4)(layers.Masking(-99999.0)(inputs))
    return keras.Model(inputs, layers.Dense(1)(x))


COLUMNS = [
    RNG.uniform(17, 90, (256, 1)).astype("float32"),
    RNG.uniform(1e4, 1e6, (256, 1)).astype("float32"),
]
PLACES = [
    RNG.uniform(2000, 3500, (256, 1)).astype("float32"),
    RNG.uniform(0, 7000, (256, 1)).astype("float32"),
]


SERIES = RNG.normal(size=(256, 8, 1)).astype("float32")
SERIES[:, 6:] = -99999.0  # Steps that are not there.
RAW = {
    census: COLUMNS,
    CrossNetwork: PLACES,
    crossed: PLACES,
    saturated: np.concatenate(COLUMNS, 1),
    masked: SERIES,
}


@pytest.mark.parametrize(
    "make", helpers.names_of(RAW, quick=[census, saturated], slow=[crossed])
)
def test_raw_columns_train_as_in_float32(make):
    columns = RAW[make]
    last = np.reshape(columns[1] if isinstance(columns, list) else columns, (256, -1))
    wanted_ones = (last[:, -1:] > last[:, -1:].mean()).astype("float32")
    if make is masked:
        wanted_ones = (SERIES[:, 0] > 0).astype("float32")
    wanted, found, model, _ = compared(make, columns, wanted_ones, 1e-2, epochs=3)
    assert found[-1] == pytest.approx(wanted[-1], rel=0.2)
    with helpers.enabled("mixed_float16"):  # Formats meet in it.
        assert np.isfinite(model.predict(columns, verbose=0)).all()


FORMATS = {
    "census": (census, {"concatenate", "norm"}),
    "cross": (CrossNetwork, {"cross_network", "cross", "norm"}),
}


@pytest.mark.parametrize("mode", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize(("make", "wide"), FORMATS.values(), ids=FORMATS)
def test_what_computes_with_raw_values_is_float32_and_products_are_not(
    make, wide, mode
):
    tfamp.enable(mode)
    model = make()
    model.compile("adam", "mse")
    model(COLUMNS)
    rows = {x.path: x for x in tfamp.describe_layers(model)}
    found = {x.path for x in rows.values() if x.policy == "float32"}
    names = {path.split("/")[-1].rstrip("_0123456789") for path in found}
    outputs = {x.path for x in rows.values() if "computes an output" in x.reason}
    assert names - {x.split("/")[-1].rstrip("_0123456789") for x in outputs} == {
        x.rstrip("_0123456789") for x in wide
    }
    assert all(x.policy == mode for path, x in rows.items() if "product" in path)


def image_network():
    inputs = keras.Input((16, 16, 3))
    x = layers.ZeroPadding2D()(layers.Rescaling(1 / 255)(inputs))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3)(x)))
    x = layers.Add()([x, layers.Conv2D(8, 3, padding="same")(x)])
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling2D()(x)))


def test_layers_behind_a_product_keep_16_bits():
    tfamp.enable("mixed_float16")
    model = image_network()
    model.compile("adam", "mse")
    found = [x.path for x in tfamp.describe_layers(model) if x.policy == "float32"]
    assert len(found) == 2 and "rescaling" in found[0] and "dense" in found[1]


def test_sums_of_raw_values_behind_a_product_are_told_of(caplog):
    tfamp.enable("mixed_float16")
    inputs = keras.Input((8, 4))
    x = layers.Dense(4)(inputs) + inputs
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile("adam", "mse")
    assert "adds or multiplies its inputs" in caplog.text


def test_a_normalization_of_float32_is_float32_and_an_override_wins():
    def policies(overrides):
        with helpers.enabled("mixed_float16", overrides=overrides):
            inputs = keras.Input((16,))
            x = layers.Dense(8, name="wide")(inputs)
            x = layers.LayerNormalization(name="norm")(x)
            model = keras.Model(inputs, layers.Dense(1)(layers.Dense(4)(x)))
            model.compile("adam", "mse")
            return model.get_layer("norm").compute_dtype

    assert policies({"wide": "float32"}) == "float32"
    assert policies({"wide": "float32", "norm": "mixed_float16"}) == "float16"
    assert policies({"wide": "mixed_float16"}) == "float16"


# ---- Sums that make a loss ----


class OwnRegularizer(keras.Regularizer):
    def __call__(self, x):
        return 1e-5 * keras.ops.sum(keras.ops.square(x * 300.0))


def plain_regularizer(x):
    return 1e-5 * tf.reduce_sum(tf.abs(x))


REGULARIZERS = {
    "L1": keras.regularizers.L1(1e-5),
    "L2": keras.regularizers.L2(1e-5),
    "own": OwnRegularizer(),
    "function": plain_regularizer,
}


@pytest.mark.parametrize(
    "mode",
    helpers.names_of(["mixed_bfloat16", "mixed_float16"], quick=["mixed_float16"]),
)
@pytest.mark.parametrize("name", REGULARIZERS)
def test_activity_regularizers_sum_in_float32(name, mode):
    def losses(mode):
        keras.utils.set_random_seed(0)
        with helpers.enabled(mode):
            inputs = keras.Input((28, 28, 1))
            body = dict(activation="relu", padding="same")
            x = layers.Conv2D(16, 3, activity_regularizer=REGULARIZERS[name], **body)(
                inputs
            )
            model = keras.Model(inputs, layers.Conv2D(1, 3, padding="same")(x))
            x = np.random.default_rng(1).uniform(size=(64, 28, 28, 1))
            fitted = helpers.fit(model, x, x, "adam", batch_size=64, epochs=2)
            return [*fitted, model.evaluate(x, x, verbose=0)]

    wanted = losses("float32")
    np.testing.assert_allclose(losses(mode), wanted, rtol=0.02)


@keras.saving.register_keras_serializable("test_first_steps")
class Regularized(keras.Model):
    def __init__(self, **keywords):
        super().__init__(**keywords)
        self.dense = layers.Dense(4, activity_regularizer="l2")

    def call(self, x):
        return self.dense(x)


@pytest.mark.issue("tensorflow#43978")
def test_a_subclassed_model_with_an_activity_regularizer_is_saved(tmp_path):
    x = np.ones((8, 3), "float32")
    with helpers.enabled("mixed_float16"):
        model = Regularized()
        helpers.fit(model, x, np.ones((8, 4)), "adam")
        model.save(tmp_path / "model.keras")
        tfamp.export(model, tmp_path / "exported")
        loaded = keras.models.load_model(tmp_path / "model.keras")
    exported = tf.saved_model.load(tmp_path / "exported")
    expected = model.predict(x, verbose=0)
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), expected)
    np.testing.assert_allclose(exported.serve(x), expected, rtol=2**-9)


SUMS = {
    "sum": lambda x: tf.reduce_sum(x),
    "sum of squares": lambda x: tf.reduce_sum(tf.square(x)),
    "mean of squares": lambda x: tf.reduce_mean(x * x),
    "for each row": lambda x: tf.reduce_mean(tf.reduce_sum(x, axis=[1, 2])),
    "norm": lambda x: tf.norm(x),
    "l2_loss": lambda x: tf.nn.l2_loss(x),
    "keras.ops": lambda x: keras.ops.sum(keras.ops.square(x)),
    "keras.ops.mean": lambda x: keras.ops.mean(keras.ops.square(x)),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_the_users_code_are_float32_and_their_gradients_16_bits(name):
    tfamp.enable("mixed_float16")
    values = tf.cast(tf.random.normal((16, 64, 64), seed=1) * 100, "float16")
    loss, slope = tf.function(helpers.value_and_gradient(SUMS[name]))(values)
    assert loss.dtype == tf.float32 and slope.dtype == tf.float16
    exact = SUMS[name](tf.cast(values, "float32"))
    assert float(loss) == pytest.approx(float(exact), rel=1e-3, abs=100)


def test_reductions_that_make_activations_keep_16_bits():
    tfamp.enable("mixed_float16")
    x = tf.ones((4, 8, 8), "float16")
    assert tf.reduce_mean(x, axis=1).dtype == tf.float16
    assert tf.reduce_sum(x, axis=-1, keepdims=True).dtype == tf.float16
    assert tf.reduce_max(x).dtype == tf.float16
    inputs = keras.Input((8, 8))
    pooled = layers.GlobalAveragePooling1D()(layers.Dense(4)(inputs))
    model = keras.Model(inputs, layers.Dense(2)(layers.Dense(4)(pooled)))
    model.compile("adam", "mse")
    assert model.layers[2].dtype_policy.compute_dtype == "float16"
    tfamp.disable()
    assert tf.reduce_sum(x).dtype == tf.float16


def in_a_loop(x):
    start = 0, tf.zeros(tf.shape(x)[:1], x.dtype)
    return tf.while_loop(
        lambda i, sums: i < 3,
        lambda i, sums: (i + 1, sums + tf.reduce_sum(x, -1)),
        start,
    )[1]


def in_a_scan(x):
    start = tf.zeros(tf.shape(x)[1:], x.dtype)
    return tf.scan(lambda state, row: state + tf.reduce_mean(row), x, start)


def in_a_map(x):
    return tf.map_fn(lambda row: tf.reduce_sum(row), x)


def in_an_array(x):
    array = tf.TensorArray(x.dtype, 1)
    return array.write(0, tf.reduce_sum(x)).stack()


def in_a_branch(x):
    branches = [lambda: tf.reduce_mean(x), lambda: x[0, 0]]
    return tf.switch_case(tf.constant(0), branches)


def with_a_gradient_of_its_own(x):
    @tf.custom_gradient
    def own(x):
        return tf.reduce_sum(x, -1), lambda slope: slope[:, None] * tf.ones_like(x)

    return own(x) + x[:, 0]


def computed_again(x):
    return tf.recompute_grad(lambda x: x * tf.reduce_mean(x))(x)


FIXED = [in_a_loop, in_a_scan, in_a_map, in_an_array, in_a_branch]
FIXED += [with_a_gradient_of_its_own, computed_again]


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("function", FIXED)
def test_sums_where_a_format_is_fixed_keep_it(function, graph):
    tfamp.enable("mixed_float16")
    run = helpers.value_and_gradient(function)
    run = tf.function(run) if graph else run
    found, exact = (run(tf.ones((4, 8), x)) for x in ("float16", "float32"))
    helpers.assert_equal(found, exact, rtol=1e-2)


# ---- Gradients by inputs ----


def image_model():
    inner = [layers.Conv2D(8, 3, activation="relu"), layers.GlobalAveragePooling2D()]
    return keras.Sequential([keras.Input((32, 32, 1)), *inner, layers.Dense(2)])


def saliency(model, factor):
    x = tf.random.normal((32, 32, 32, 1), seed=1)
    run = helpers.value_and_gradient(lambda x: factor * tf.reduce_mean(model(x) ** 2))
    return run(x)[1].numpy()


def test_a_gradient_by_an_input_that_float16_loses_is_told_of_once():
    tfamp.enable("mixed_float16")
    model = image_model()
    with pytest.warns(UserWarning, match="by an input is 0 in .*precision_scope"):
        lost = saliency(model, 1e-3)
    assert np.mean(lost == 0) > 0.1
    saliency(model, 1e-3)  # No second warning.
    with tfamp.precision_scope(model, "float32"):
        exact = saliency(model, 1e-3)
    assert np.mean(exact == 0) < 0.1
    assert model.layers[0].compute_dtype == "float16"


def test_gradients_that_are_not_lost_are_not_told_of():
    tfamp.enable("mixed_float16")
    saliency(image_model(), 1e3)
    relu = helpers.value_and_gradient(lambda x: tf.reduce_mean(tf.nn.relu(x)))
    _, slope = relu(tf.random.normal((64, 64), seed=1))
    assert np.mean(slope == 0) > 0.4  # Zeros of its own.


def test_a_precision_scope_puts_everything_back():
    model = image_model()
    policies = [x.dtype_policy for x in model.layers]
    with pytest.raises(KeyError):
        with tfamp.precision_scope(
            model, "mixed_float16", {"sequential.*/conv.*": "float32"}
        ):
            raise KeyError
    assert [x.dtype_policy for x in model.layers] == policies
    with pytest.raises(ValueError, match="mixed_float8"):
        with tfamp.precision_scope(model, "mixed_float8"):
            pass
