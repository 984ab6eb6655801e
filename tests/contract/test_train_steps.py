"""A `train_step` of a model's own scales its loss without a call."""

import functools

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
import workers

import tfamp

pytestmark = pytest.mark.usefixtures("disabled")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 16)).astype("float32")
Z = X[:, :8]
SMALL = (1e-4 * np.tanh(X @ RNG.normal(size=(16, 32)))).astype("float32")
TINY = 1e-6  # Makes gradients that float16 has no numbers for.


# ---- One optimizer, that of `compile` ----


class Regression(keras.Sequential):
    """Its loss is a mean over small targets: gradients underflow in float16."""

    how = ""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape(persistent=self.how == "persistent") as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            target = loss
            if self.how == "scale_loss":
                target = self.optimizer.scale_loss(loss)
            if self.how == "dynamic_scale":
                target = loss * self.optimizer.dynamic_scale
        gradients = tape.gradient(target, weights)
        norm = tf.linalg.global_norm(gradients)
        if self.how == "clipped":
            gradients, _ = tf.clip_by_global_norm(gradients, 1e-6)
        if self.how == "apply_gradients":
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        else:
            self.optimizer.apply(gradients, weights)
        return {"loss": loss, "norm": norm}


def regression(mode, how="", bad=False, **keywords):
    """Returns the weights, the first norm of gradients, and the model after 60 steps.

    The last layer is of 16 bits, and so are its gradients.
    """
    keras.utils.set_random_seed(0)
    last = {".*/last": mode} if mode != "float32" else None
    tfamp.enable(mode, overrides=last)
    small = keras.initializers.RandomNormal(stddev=1e-5)
    body = keras.layers.Dense(64, "tanh"), keras.layers.Dense(32, None, name="last")
    body[1].kernel_initializer = small
    model = Regression([keras.Input((16,)), *body])
    model.how = how
    model.compile(keras.optimizers.SGD(1.0), **keywords)
    data = tf.data.Dataset.from_tensors((X * np.inf if bad else X, SMALL)).repeat()
    steps = 3 if bad else 60
    logs = model.fit(data, steps_per_epoch=steps, epochs=1, verbose=0, shuffle=False)
    tfamp.disable()
    weights = np.concatenate([np.ravel(x) for x in model.get_weights()])
    return weights, logs.history["norm"][0], model


FORMS = ["", "apply_gradients", "persistent", "clipped"]


@pytest.mark.parametrize(
    ("how", "keywords"),
    [
        *((how, {}) for how in FORMS),
        ("", {"run_eagerly": True}),
        ("", {"jit_compile": True}),
    ],
)
def test_gradients_are_true_and_do_not_underflow(how, keywords):
    wanted, norm, _ = regression("float32", how, **keywords)
    found, seen, model = regression("mixed_float16", how, **keywords)
    assert model.layers[-1].compute_dtype == "float16"
    np.testing.assert_allclose(seen, norm, rtol=1e-2)
    np.testing.assert_allclose(found, wanted, rtol=1e-2, atol=1e-6)
    assert int(model.optimizer.iterations) == 60


@pytest.mark.parametrize("how", ["scale_loss", "dynamic_scale"])
def test_who_scales_by_himself_is_not_scaled_twice(how, monkeypatch):
    """Bit for bit what it is without our part in it."""
    found, norm, model = regression("mixed_float16", how)
    without = "tfamp.loss_scaling.train_steps.HOOKS.install"
    monkeypatch.setattr(without, lambda: None)
    wanted, alone, other = regression("mixed_float16", how)
    np.testing.assert_array_equal(found, wanted)
    assert norm == alone
    assert float(model.optimizer.loss_scale) == float(other.optimizer.loss_scale)


@pytest.mark.device
def test_a_step_with_infinity_changes_nothing_and_lowers_the_scale():
    with pytest.warns(UserWarning, match="not finite in float32 either.* is inf"):
        _, _, model = regression("mixed_float16", bad=True)
    assert int(model.optimizer.skipped_steps) == 3
    assert float(model.optimizer.loss_scale) == 2.0**12
    assert np.isfinite(np.concatenate([np.ravel(x) for x in model.get_weights()])).all()


class Sharpness(keras.Sequential):
    """SAM: it moves the weights by their gradients, and back."""

    how = ""

    def train_step(self, data):
        weights, moves = self.trainable_variables, []

        def gradients():
            with tf.GradientTape() as tape:
                loss = self.compute_loss(*data, self(data[0], training=True))
            return loss, tape.gradient(loss, weights)

        _, first = gradients()
        scale = 0.05 / (tf.linalg.global_norm(first) + 1e-12)
        for gradient, weight in zip(first, weights, strict=True):
            moves.append(gradient * scale)
            weight.assign_add(moves[-1])
        loss, second = gradients()
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_sub(move)
        if self.how == "assigned":  # No optimizer has a part in it.
            for gradient, weight in zip(second, weights, strict=True):
                weight.assign_sub(1e-5 * gradient)
        else:
            self.optimizer.apply_gradients(zip(second, weights, strict=True))
        return {"loss": loss}


@pytest.mark.filterwarnings("ignore:.*training steps of this epoch")
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("how", ["applied", "assigned"])
def test_a_step_that_writes_gradients_to_weights_loses_none(how, eager):
    labels = RNG.integers(0, 4, 64)

    def run(mode):
        keras.utils.set_random_seed(0)
        tfamp.enable(mode)
        body = keras.layers.Dense(32, "relu"), keras.layers.Dense(4)
        model = Sharpness([keras.Input((16,)), *body])
        model.how = how
        loss = keras.losses.SparseCategoricalCrossentropy(True, reduction="sum")
        model.compile(keras.optimizers.SGD(1e-5), loss, run_eagerly=eager)

        def fit(epochs):
            data = 50 * np.abs(X), labels
            model.fit(*data, 16, epochs=epochs, shuffle=False, verbose=0)
            return model.evaluate(*data, verbose=0)

        first = fit(4)
        if mode == "mixed_float16":  # A later overflow, as growth brings.
            model.optimizer.dynamic_scale.assign(2.0**24)
        last = fit(8)
        tfamp.disable()
        return first, last, model

    wanted = run("float32")
    found = run("mixed_float16")
    assert all(np.isfinite(each).all() for each in found[2].get_weights())
    assert found[2].optimizer.dynamic_scale < 2.0**20
    assert found[1] < found[0]
    if not eager:  # The scale was sought on the first batch.
        assert found[0] == pytest.approx(wanted[0], rel=0.01)


def test_it_is_off_with_loss_scale_false_and_after_disable():
    original = Regression.train_step
    for off in ({"loss_scale": False}, {}):
        with helpers.enabled("mixed_float16", **off):
            model = Regression([keras.Input((16,)), keras.layers.Dense(1)])
            helpers.fit(model, X, X[:, :1], loss=None)
            assert (Regression.train_step is original) == bool(off)
            assert (type(model.optimizer) is keras.optimizers.SGD) == bool(off)
    assert Regression.train_step is original


def test_a_train_step_that_calls_keras_own_is_scaled_once():
    class Wrapping(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    def losses(kind):
        keras.utils.set_random_seed(0)
        with helpers.enabled("mixed_float16"):
            model = kind([keras.Input((16,)), keras.layers.Dense(1)])
            return helpers.fit(model, X, X[:, :1], keras.optimizers.SGD(0.01), epochs=3)

    assert losses(Wrapping) == losses(keras.Sequential)


# ---- Optimizers that the model holds ----


def dense(inputs, units, outputs):
    layers = keras.layers.Dense(units, "tanh"), keras.layers.Dense(outputs)
    return keras.Sequential([keras.Input((inputs,)), *layers])


class Gan(keras.Model):
    """A generator and a critic; each step returns the gradients as they are applied."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = dense(8, 32, 16), dense(16, 32, 1)
        self.built = True

    def compile(self, **keywords):
        super().compile(**keywords)
        self.optimizers = [keras.optimizers.SGD(1e3), keras.optimizers.SGD(1e3)]

    def apply(self, index, loss, tape, variables):
        gradients = tape.gradient(loss, variables)
        self.optimizers[index].apply_gradients(zip(gradients, variables, strict=True))
        return gradients


class TwoOptimizers(Gan):
    def train_step(self, data):
        z, x = data
        with tf.GradientTape() as first, tf.GradientTape() as second:
            fake = self.critic(self.generator(z, training=True), training=True)
            real = self.critic(x, training=True)
            made = -TINY * tf.reduce_mean(tf.math.log_sigmoid(fake))
            told = tf.math.log_sigmoid(real) + tf.math.log_sigmoid(-fake)
            told = -TINY * tf.reduce_mean(told)
        critic = self.critic.trainable_variables
        generator = self.generator.trainable_variables
        return [
            *self.apply(0, told, second, critic),
            *self.apply(1, made, first, generator),
        ]


class Penalty(Gan):
    """WGAN-GP: a gradient by inputs, differentiated again."""

    def train_step(self, data):
        x = data[1]
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                score = self.critic(x, training=True)
            slope = inner.gradient(score, [x])[0]
            norm = tf.sqrt(tf.reduce_sum(slope**2, axis=1))
            loss = TINY * tf.reduce_mean((norm - 1.0) ** 2)
        return self.apply(0, loss, outer, self.critic.trainable_variables[:-1])


class SecondGradients(Gan):
    """As in MAML: a loss after a step, differentiated through the step."""

    def train_step(self, data):
        x, weights = data[1], self.critic.trainable_variables
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean(self.critic(x, training=True) ** 2)
            slopes = inner.gradient(loss, weights)
            after = [w - 0.1 * slope for w, slope in zip(weights, slopes, strict=True)]
            y = tf.tanh(x @ after[0] + after[1]) @ after[2] + after[3]
            loss = TINY * tf.reduce_mean((y - 1.0) ** 2)
        return self.apply(0, loss, outer, weights)


class Accumulation(Gan):
    def train_step(self, data):
        weights, total = self.critic.trainable_variables, None
        for part in tf.split(data[1], 4):
            with tf.GradientTape() as tape:
                loss = TINY * tf.reduce_mean((self.critic(part) - 1.0) ** 2) / 4
            slopes = tape.gradient(loss, weights)
            total = [a + b for a, b in zip(total or slopes, slopes, strict=True)]
        self.optimizers[0].apply(total, weights)
        return total


class Jacobian(Gan):
    def train_step(self, data):
        weights = self.critic.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            y = tf.reduce_mean(self.critic(data[1], training=True), 0)
        rows = [TINY * each[0] for each in tape.jacobian(y, weights)]
        self.optimizers[0].apply(rows, weights)
        return rows


class Indented(Gan):
    """Takes the gradient inside of the tape's block."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = TINY * tf.reduce_mean(self.critic(data[1], training=True) ** 2)
            return self.apply(0, loss, tape, self.critic.trainable_variables)


MODELS = [TwoOptimizers, Penalty, SecondGradients, Accumulation, Jacobian, Indented]


def named(kind):
    class Named(kind):
        def train_step(self, data):
            return {str(i): x for i, x in enumerate(super().train_step(data))}

    return Named


def train(kind, mode, strategy=None, skip=False, **keywords):
    """Returns the gradients of one step, and the weights after it, as two arrays."""
    keras.utils.set_random_seed(0)
    with helpers.enabled(mode), (strategy or tf.distribute.get_strategy()).scope():
        model = (kind if strategy else named(kind))()
        model.compile(**keywords)
        data = tf.data.Dataset.from_tensor_slices((Z, X)).batch(64)
        logs = {} if skip else model.fit(data, verbose=0, shuffle=False).history
    parts = model.critic.get_weights() + model.generator.get_weights()
    weights = np.concatenate([np.ravel(x) for x in parts])
    gradients = [np.ravel(x[0]) for x in logs.values()]
    return np.concatenate(gradients) if gradients else None, weights


def far(found, wanted):
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize(
    "keywords", [{}, {"run_eagerly": True}], ids=["graph", "eager"]
)
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_those_of_float32(kind, keywords):
    found, weights = train(kind, "mixed_float16", **keywords)
    wanted, after = train(kind, "float32", **keywords)
    assert far(found, wanted) < 1e-2
    assert far(weights, after) < 1e-3


class Silent(TwoOptimizers):
    def train_step(self, data):
        super().train_step(data)
        return {"none": 0.0}


def replicas():
    """Returns the distances of the weights' moves on two replicas, in a process."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    modes = "float32", "mixed_float16"
    start = train(Gan, "float32", skip=True)[1]
    wanted, found = (train(Silent, mode, strategy)[1] - start for mode in modes)
    return float(far(found, wanted)), float(np.linalg.norm(wanted))


def test_replicas_take_the_same_step():
    ((distance, moved),) = workers.run(replicas, workers=1, cpus=2, timeout=300)
    assert distance < 1e-2
    assert moved > 0


# Keras 3.10 makes numbers of logs with an axis.
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
def test_plain_optimizers_skip_and_move_the_scale_of_compile():
    keras.utils.set_random_seed(0)
    tfamp.enable("mixed_float16")
    model = named(TwoOptimizers)()
    model.compile()
    before = model.critic.get_weights()
    fit = functools.partial(model.fit, batch_size=64, verbose=0)
    with pytest.warns(UserWarning, match="y has 0 NaN, its largest number is inf"):
        fit(Z, X * np.inf, epochs=5)
    helpers.assert_equal(model.critic.get_weights(), before)
    assert int(model.optimizers[0].iterations) == 0
    assert float(model.optimizer.loss_scale) < 2.0**12
    fit(Z, X)
    assert int(model.optimizers[0].iterations) == 1


class SetsLater(Regression):
    """As keras.io's NeRF: `compile` gets the optimizer after Keras has compiled."""

    def compile(self, optimizer, **keywords):
        super().compile(**keywords)
        self.optimizer = optimizer


def test_an_optimizer_that_is_set_after_compile_is_scaled(monkeypatch):
    wanted, norm, _ = regression("mixed_float16")
    monkeypatch.setitem(globals(), "Regression", SetsLater)
    found, seen, model = regression("mixed_float16")
    assert isinstance(model.optimizer, tfamp.LossScaleOptimizer)
    assert seen == norm
    np.testing.assert_array_equal(found, wanted)


def test_apply_gradients_of_a_users_optimizer_is_called():
    class Centralized(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars):
            pairs = [(0 * gradient, v) for gradient, v in grads_and_vars]
            return super().apply_gradients(pairs)

    tfamp.enable("mixed_float16")
    model = dense(16, 8, 1)
    before = model.get_weights()
    helpers.fit(model, X, X[:, :1], Centralized(0.1))
    helpers.assert_equal(model.get_weights(), before)


# ---- Loops outside of `fit` ----


def test_a_loop_that_scales_nothing_is_told_once(caplog):
    tfamp.enable("mixed_float16")
    model, optimizer = dense(16, 8, 1), keras.optimizers.SGD(0.1)
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(X) ** 2)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
    said = [x.getMessage() for x in caplog.records if "not scaled" in x.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(__file__)
    assert "optimizer.scale_loss(loss)" in said[0]


@pytest.mark.parametrize("mode", ["mixed_float16", "mixed_bfloat16"])
def test_a_loop_that_scales_is_told_nothing(mode, caplog):
    tfamp.enable(mode)
    model = dense(16, 8, 1)
    helpers.fit(model, X, X[:, :1], keras.optimizers.SGD(0.1))
    optimizer, weights = tfamp.wrap_optimizer("sgd"), model.trainable_variables
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(tf.reduce_mean(model(X) ** 2))
    optimizer.apply(tape.gradient(loss, weights), weights)
    assert "scale" not in caplog.text


# ---- Inputs beyond float16 ----

PRICES = RNG.uniform(1e5, 2e5, (32, 1)).astype("float32")


def by_names():
    inputs = {name: keras.Input((1,), name=name) for name in ("age", "price")}
    parts = [keras.layers.Dense(4)(each) for each in inputs.values()]
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(parts)))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.body = keras.layers.Dense(1)

    def call(self, inputs):
        return self.body(keras.ops.concatenate([inputs["age"], inputs["price"]], -1))


XLA = {"jit_compile": True}


@pytest.mark.parametrize(
    "keywords",
    helpers.names_of([{}, {"run_eagerly": True}, XLA], [{}, {"run_eagerly": True}]),
)
@pytest.mark.parametrize("make", [by_names, Subclassed])
def test_an_input_beyond_float16_is_told_by_its_name_and_value(make, keywords):
    tfamp.enable("mixed_float16")
    model = make()
    model.compile(keras.optimizers.SGD(1e-12), "mse", **keywords)
    inputs = {"price": PRICES, "age": PRICES / 1e6}
    with pytest.warns(UserWarning, match="'price' up to 1[0-9]+") as caught:
        model.fit(inputs, PRICES / 1e6, batch_size=4, verbose=0)
    (told,) = [x for x in caught if "price" in str(x.message)]
    assert told.filename == __file__
    assert "'age'" not in str(told.message)
    assert int(model.optimizer.skipped_steps) == 0


def test_exact_inputs_beyond_float16_are_no_matter():
    tfamp.enable("mixed_float16")
    scale = keras.layers.Normalization()
    scale.adapt(PRICES)
    model = keras.Sequential([keras.Input((1,)), scale, keras.layers.Dense(1)])
    helpers.fit(model, PRICES, PRICES / 1e6, batch_size=4)
    assert int(model.optimizer.skipped_steps) == 0
