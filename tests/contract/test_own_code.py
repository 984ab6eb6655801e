"""Scripts with code of their own, in the forms of keras.io's examples, in each mode.

A script does what it does in float32: it runs, and its last loss is float32's.
"""

import functools
import itertools

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

pytestmark = pytest.mark.usefixtures("disabled")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 16)).astype("float32")
Y = np.tanh(X @ RNG.normal(size=(16, 1)) / 4).astype("float32")
IDS = RNG.integers(0, 32, (32, 12))
layers = keras.layers


def last(model, *data, loss=None, rate=0.01, epochs=4, **keywords):
    """Compiles and trains a model; returns its last loss."""
    model.compile(keras.optimizers.Adam(rate), loss)
    fitted = model.fit(*data, epochs=epochs, verbose=0, shuffle=False, **keywords)
    # Of a `train_step` that returns "loss" alone, Keras reports its own metric: 0.
    (key,) = {"last", "loss"} & {*fitted.history}
    assert (found := fitted.history[key][-1]) != 0
    return found


# ---- Generative models ----


class Sampling(layers.Layer):
    def call(self, inputs):
        mean, log_variance = inputs
        noise = tf.random.normal(tf.shape(mean), seed=1)
        return mean + tf.exp(0.5 * log_variance) * noise


class Vae(keras.Model):
    def __init__(self):
        super().__init__()
        self.body, self.sampling = layers.Dense(16, "relu"), Sampling()
        self.mean, self.log_variance = layers.Dense(4), layers.Dense(4)
        self.decoder = keras.Sequential([layers.Dense(16, "relu"), layers.Dense(16)])
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, x):
        body = self.body(x)
        return self.decoder(self.sampling([self.mean(body), self.log_variance(body)]))

    def train_step(self, x):
        with tf.GradientTape() as tape:
            body = self.body(x)
            mean, log_variance = self.mean(body), self.log_variance(body)
            made = self.decoder(self.sampling([mean, log_variance]))
            error = tf.reduce_mean(tf.reduce_sum(tf.square(x - made), axis=1))
            kl = 1 + log_variance - tf.square(mean) - tf.exp(log_variance)
            loss = error - 0.5 * tf.reduce_mean(tf.reduce_sum(kl, axis=1))
        gradients = tape.gradient(loss, self.trainable_weights)
        pairs = zip(gradients, self.trainable_weights, strict=True)
        self.optimizer.apply_gradients(pairs)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def vae():
    model = Vae()
    model(X)
    return last(model, X, epochs=16)


class Quantizer(layers.Layer):
    """VQ-VAE's: a codebook that is read by operators of TensorFlow."""

    def build(self, shape):
        start = keras.initializers.RandomNormal(seed=3)
        self.codes = self.add_weight(shape=(shape[-1], 8), initializer=start)

    def call(self, x):
        nearest = tf.reduce_sum(x**2, axis=1, keepdims=True)
        nearest += tf.reduce_sum(self.codes.value**2, axis=0)
        nearest -= 2 * tf.matmul(x, self.codes.value)
        chosen = tf.one_hot(tf.argmin(nearest, axis=1), 8)
        quantized = tf.matmul(chosen, self.codes.value, transpose_b=True)
        self.add_loss(tf.reduce_mean((tf.stop_gradient(x) - quantized) ** 2))
        return x + tf.stop_gradient(quantized - x)


def quantized():
    inputs = keras.Input((16,))
    x = Quantizer()(layers.Dense(4)(inputs))
    return last(keras.Model(inputs, layers.Dense(16)(x)), X, X, loss="mse")


class Diffusion(keras.Model):
    """Noise, rates and sinusoids of time in float32; a network's moving average."""

    def __init__(self):
        super().__init__()
        self.network = self.make()
        self.average = self.make()
        self.average.set_weights(self.network.get_weights())
        self.built = True

    @staticmethod
    def make():
        noisy, time = keras.Input((16,)), keras.Input((1,))

        def sinusoids(x):
            angles = 2.0 * np.pi * tf.exp(tf.linspace(0.0, 3.0, 4)) * x
            return tf.concat([tf.sin(angles), tf.cos(angles)], axis=-1)

        x = layers.Concatenate()([noisy, layers.Lambda(sinusoids)(time)])
        x = layers.Dense(32, "swish")(x)
        return keras.Model([noisy, time], layers.Dense(16)(x))

    def train_step(self, x):
        noise = tf.random.normal(tf.shape(x), seed=1)
        time = tf.random.uniform((tf.shape(x)[0], 1), seed=2)
        signal, rate = tf.cos(time), tf.sin(time)
        with tf.GradientTape() as tape:
            found = self.network([signal * x + rate * noise, rate**2], training=True)
            loss = tf.reduce_mean(keras.losses.mean_absolute_error(noise, found))
        weights = self.network.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        for weight, average in zip(
            self.network.weights, self.average.weights, strict=True
        ):
            average.assign(0.9 * average + 0.1 * weight)
        return {"last": loss}


def diffusion():
    return last(Diffusion(), X)


class Wgan(keras.Model):
    def __init__(self):
        super().__init__()
        self.critic = keras.Sequential(
            [keras.Input((16,)), layers.Dense(16, "tanh"), layers.Dense(1)]
        )
        self.generator = keras.Sequential([keras.Input((4,)), layers.Dense(16)])
        self.built = True

    def compile(self, *_):
        super().compile()
        self.of_critic = keras.optimizers.Adam(0.005)
        self.of_generator = keras.optimizers.Adam(0.005)

    def penalty(self, real, fake):
        share = tf.random.uniform([tf.shape(real)[0], 1], seed=1)
        between = real + share * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            score = self.critic(between, training=True)
        slope = tape.gradient(score, [between])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(slope), axis=1))
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, real):
        z = tf.random.normal((tf.shape(real)[0], 4), seed=2)
        with tf.GradientTape() as tape:
            fake = self.generator(z, training=True)
            loss = tf.reduce_mean(self.critic(fake)) - tf.reduce_mean(self.critic(real))
            loss += 10.0 * self.penalty(real, fake)
        weights = self.critic.trainable_variables
        slopes = tape.gradient(loss, weights)
        self.of_critic.apply_gradients(zip(slopes, weights, strict=True))
        with tf.GradientTape() as tape:
            made = -tf.reduce_mean(self.critic(self.generator(z, training=True)))
        weights = self.generator.trainable_variables
        slopes = tape.gradient(made, weights)
        self.of_generator.apply_gradients(zip(slopes, weights, strict=True))
        return {"last": loss}


def wgan():
    return last(Wgan(), X)


# ---- Contrastive learning ----


class Queue(keras.Model):
    """NNCLR's: a queue of features in float32, and the nearest of it."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((16,)), layers.Dense(8)])
        start = tf.math.l2_normalize(tf.random.normal((32, 8), seed=4), axis=1)
        self.queue = tf.Variable(start, trainable=False)
        self.built = True

    def nearest(self, features):
        similarity = tf.matmul(features, self.queue, transpose_b=True)
        found = tf.gather(self.queue, tf.argmax(similarity, axis=1), axis=0)
        return features + tf.stop_gradient(found - features)

    def train_step(self, x):
        first, second = x + 0.01, x - 0.01
        with tf.GradientTape() as tape:
            a = tf.math.l2_normalize(self.encoder(first, training=True), axis=1)
            b = tf.math.l2_normalize(self.encoder(second, training=True), axis=1)
            logits = tf.matmul(self.nearest(a), b, transpose_b=True) / 0.5
            labels = tf.range(tf.shape(logits)[0])
            loss = keras.losses.sparse_categorical_crossentropy(
                labels, logits, from_logits=True
            )
            loss = tf.reduce_mean(loss)
        weights = self.encoder.trainable_weights
        slopes = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(slopes, weights, strict=True))
        self.queue.assign(tf.concat([a[:8], self.queue[:-8]], axis=0))
        return {"last": loss}


def contrastive():
    return last(Queue(), X, rate=0.005)


# ---- Transformers from scratch ----


class Attention(layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.q, self.k, self.v = (layers.Dense(units) for _ in range(3))

    def call(self, x):
        length = tf.shape(x)[1]
        scores = tf.matmul(self.q(x), self.k(x), transpose_b=True)
        scores = scores / tf.math.sqrt(tf.cast(tf.shape(x)[-1], tf.float32))
        mask = 1.0 - tf.linalg.band_part(tf.ones((length, length)), -1, 0)
        return tf.matmul(tf.nn.softmax(scores + mask * -1e9), self.v(x))


class Positions(layers.Layer):
    def build(self, shape):
        angles = np.arange(12)[:, None] / 100.0 ** (np.arange(16)[None] / 16)
        self.table = tf.constant(np.sin(angles), tf.float32)

    def call(self, x):
        return x * tf.math.sqrt(16.0) + self.table[None, : tf.shape(x)[1]]


def transformer():
    inputs = keras.Input((12,), dtype="int32")
    x = Positions()(layers.Embedding(32, 16)(inputs))
    x = layers.LayerNormalization(epsilon=1e-6)(x + Attention(16)(x))
    model = keras.Model(inputs, layers.Dense(32)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return last(model, IDS, np.roll(IDS, -1, 1), loss=loss)


# ---- Graphs, fields, factors ----


class Graph(layers.Layer):
    def __init__(self):
        super().__init__()
        self.body = layers.Dense(8, "relu")
        self.edges = tf.constant(
            np.random.default_rng(2).integers(0, 64, (2, 128)), tf.int32
        )
        self.weights_of_edges = tf.ones(128) / 64.0

    def call(self, nodes):
        messages = self.body(tf.gather(nodes, self.edges[1]))
        messages = messages * self.weights_of_edges[:, None]
        total = tf.math.unsorted_segment_sum(messages, self.edges[0], 64)
        x = tf.math.l2_normalize(tf.concat([nodes, total], axis=1), axis=-1)
        return x / (tf.norm(x, axis=-1, keepdims=True) + 1e-12)


def graph():
    model = keras.Sequential([keras.Input((16,)), Graph(), layers.Dense(1)])
    return last(model, X, Y, loss="mse", batch_size=64, epochs=8)


class Field(keras.Model):
    """NeRF's: encoded rays, and what is rendered of a network's outputs."""

    def __init__(self):
        super().__init__()
        body = [layers.Dense(32, "relu"), layers.Dense(4)]
        self.network = keras.Sequential([keras.Input((8, 13)), *body])
        self.built = True

    def train_step(self, data):
        rays, colors = data
        steps = tf.linspace(0.5, 2.0, 8)
        points = rays[:, None, :1] * steps[None, :, None]
        parts = [points]
        for i in range(6):
            parts += [tf.sin(2.0**i * points), tf.cos(2.0**i * points)]
        with tf.GradientTape() as tape:
            found = self.network(tf.concat(parts, axis=-1))
            density = tf.nn.relu(found[..., 3])
            alpha = 1.0 - tf.exp(-density * (steps[1] - steps[0]))
            passed = tf.math.cumprod(1.0 - alpha + 1e-10, axis=-1, exclusive=True)
            color = tf.sigmoid(found[..., :3])
            image = tf.reduce_sum((alpha * passed)[..., None] * color, axis=1)
            loss = tf.reduce_mean((colors - image) ** 2)
        weights = self.network.trainable_variables
        slopes = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(slopes, weights, strict=True))
        return {"last": loss}


def field():
    return last(Field(), X, np.abs(X[:, :3]) / 3)


class Lora(layers.Layer):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.down = tf.Variable(tf.ones((16, 2)) / 8)
        self.up = self.add_weight(shape=(2, 8), initializer="zeros", name="up")

    def call(self, x):
        return self.inner(x) + tf.matmul(tf.matmul(x, self.down), self.up.value) * 0.5


def lora():
    frozen = layers.Dense(8)
    frozen.trainable = False
    model = keras.Sequential([keras.Input((16,)), Lora(frozen), layers.Dense(1)])
    return last(model, X, Y, loss="mse")


class Ctc(layers.Layer):
    def call(self, labels, scores):
        count = tf.cast(tf.shape(labels)[0], "int64")
        frames = tf.cast(tf.shape(scores)[1], "int64") * tf.ones((count,), "int64")
        length = tf.cast(tf.shape(labels)[1], "int64") * tf.ones((count,), "int64")
        loss = keras.ops.ctc_loss(labels, scores, length, frames, mask_index=0)
        self.add_loss(tf.reduce_mean(loss))
        return scores


def ctc():
    sound = keras.Input((10, 16))
    labels = keras.Input((3,), dtype="int32")
    scores = layers.Dense(6)(layers.Dense(16, "relu")(sound))
    model = keras.Model([sound, labels], Ctc()(labels, scores))
    x = np.repeat(X[:, None], 10, 1)
    return last(model, [x, np.random.default_rng(1).integers(1, 6, (64, 3))], epochs=3)


# ---- Loops ----


def critics():
    """DDPG's: two networks, their targets, and a compiled update."""
    critic = keras.Sequential(
        [keras.Input((16,)), layers.Dense(16, "relu"), layers.Dense(1)]
    )
    target = keras.models.clone_model(critic)
    target.set_weights(critic.get_weights())
    optimizer = tfamp.wrap_optimizer(keras.optimizers.Adam(0.01))
    optimizer.build(critic.trainable_variables)
    rewards = tf.constant(Y)

    @tf.function
    def update(states, rewards):
        with tf.GradientTape() as tape:
            wanted = rewards + 0.9 * target(states, training=True)
            loss = tf.math.reduce_mean(tf.math.square(wanted - critic(states)))
            scaled = optimizer.scale_loss(loss)
        weights = critic.trainable_variables
        optimizer.apply(tape.gradient(scaled, weights), weights)
        for old, new in zip(target.variables, critic.variables, strict=True):
            old.assign(0.1 * new + 0.9 * old)
        return loss

    return [float(update(tf.constant(X), rewards)) for _ in range(10)][-1]


def policy():
    """An actor's probabilities are drawn from by NumPy, and differentiated."""
    inputs = keras.Input((16,))
    common = layers.Dense(16, "relu")(inputs)
    outputs = layers.Dense(4, "softmax")(common), layers.Dense(1)(common)
    model = keras.Model(inputs, list(outputs))
    optimizer = tfamp.wrap_optimizer(keras.optimizers.Adam(0.01), initial_scale=256)
    draws = np.random.default_rng(0)
    for state in X[:10]:
        with tf.GradientTape() as tape:
            chances, value = model(state[None])
            action = draws.choice(4, p=np.squeeze(chances))
            gain = 1.0 - value[0, 0]
            loss = -tf.math.log(chances[0, action] + 1e-10) * gain + gain**2
            scaled = optimizer.scale_loss(loss)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(scaled, weights), weights)
    chances, value = model(X)
    return float(tf.reduce_mean(value)) + float(tf.reduce_max(chances))


GENERATIVE = [vae, quantized, diffusion, wgan]
OTHERS = [contrastive, transformer, graph, field, lora, ctc]
SCRIPTS = [*GENERATIVE, *OTHERS, critics, policy]


@functools.cache  # Both modes are compared with float32.
def run(script, mode):
    keras.utils.set_random_seed(0)
    with helpers.enabled(mode):
        return script()


@helpers.in_both
@pytest.mark.parametrize("script", helpers.names_of(SCRIPTS, quick=[vae, transformer]))
def test_the_last_loss_is_that_of_float32(script, mode):
    wanted, found = run(script, "float32"), run(script, mode)
    assert found == pytest.approx(wanted, rel=0.05, abs=0.02)


class Holder(keras.Model):
    """Trains a model that only its own `train_step` calls."""

    def __init__(self, decoder):
        super().__init__()
        self.decoder = decoder

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.decoder(x) ** 2)
        weights = self.decoder.trainable_weights
        slopes = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(slopes, weights, strict=True))
        return {"last": loss}


@helpers.in_both
def test_a_model_that_a_train_step_calls_predicts_alike_once_loaded(mode, tmp_path):
    tfamp.enable(mode)
    inputs = keras.Input((16,))
    decoder = keras.Model(inputs, layers.Dense(3)(layers.Dense(8)(inputs)))
    last(Holder(decoder), X)
    assert decoder.layers[-1].compute_dtype == "float32"
    wanted = decoder.predict(X, verbose=0)
    decoder.save(tmp_path / "decoder.keras")
    loaded = keras.models.load_model(tmp_path / "decoder.keras")
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), wanted)


class OwnPositions(keras.Model):
    """Reads integers, though it takes floats."""

    def __init__(self):
        super().__init__()
        self.embedding, self.dense = layers.Embedding(16, 1), layers.Dense(1)

    def call(self, x):
        return self.dense(x + self.embedding(tf.range(16))[:, 0])


def test_a_model_that_was_called_is_exported_without_sample_inputs(tmp_path):
    tfamp.enable("mixed_bfloat16")
    model = OwnPositions()
    helpers.fit(model, X, Y)
    tfamp.export(model, tmp_path / "model", "float32")
    served = tf.saved_model.load(str(tmp_path / "model"))
    assert served.serve(X).dtype == "float32"


YEARS = (1990 + np.arange(64)[:, None]).astype("float32")
MOVING = {
    "Reshape": lambda x: layers.Reshape((2, 2))(x),
    "Flatten": lambda x: layers.Flatten()(layers.Reshape((2, 2))(x)),
    "Permute": lambda x: layers.Permute((2, 1))(layers.Reshape((2, 2))(x)),
    "RepeatVector": lambda x: layers.RepeatVector(3)(x),
    "Cropping1D": lambda x: layers.Cropping1D(1)(layers.Reshape((4, 1))(x)),
    "ZeroPadding1D": lambda x: layers.ZeroPadding1D(1)(layers.Reshape((4, 1))(x)),
    "ZeroPadding2D": lambda x: layers.ZeroPadding2D(1)(layers.Reshape((2, 2, 1))(x)),
    "UpSampling1D": lambda x: layers.UpSampling1D(2)(layers.Reshape((4, 1))(x)),
    "UpSampling2D": lambda x: layers.UpSampling2D(2)(layers.Reshape((2, 2, 1))(x)),
    "Concatenate": lambda x: layers.Concatenate()([x, x]),
    "Identity": lambda x: layers.Identity()(x),
    "Dropout": lambda x: layers.Dropout(0.5)(x),
    "slices": lambda x: layers.Concatenate()([x[:, 2:], x[:, :1]]),
    "Lambda": lambda x: layers.Lambda(
        lambda x: tf.gather(x[..., ::-1], [0, 2], axis=1)
    )(x),
    "split": lambda x: keras.ops.stack(keras.ops.split(x, 2, axis=1), axis=1),
    "roll": lambda x: keras.ops.roll(keras.ops.transpose(x[:, None]), 1, axis=0),
    "expand": lambda x: keras.ops.squeeze(keras.ops.expand_dims(x, 1), 1),
    "broadcast": lambda x: keras.ops.broadcast_to(x[:, :, None], (64, 4, 2)),
    "flip": lambda x: keras.ops.flip(keras.ops.pad(x, ((0, 0), (1, 1))), 1),
    "take": lambda x: keras.ops.take(keras.ops.tile(x, (1, 2)), [0, 5], axis=1),
}


@pytest.mark.issue("keras#19332")
@pytest.mark.parametrize(
    ("name", "mode"), [*zip(MOVING, itertools.cycle(helpers.LOW), strict=False)]
)
def test_raw_values_are_exact_through_what_only_moves_them(name, mode):
    def run(mode):
        with helpers.enabled(mode):
            inputs = keras.Input((4,), batch_size=64)
            scale = layers.Normalization(axis=None, mean=2021.5, variance=1.0)
            model = keras.Model(inputs, scale(MOVING[name](inputs)))
            return model.predict(YEARS + np.arange(4) / 4, batch_size=64, verbose=0)

    np.testing.assert_array_equal(run(mode), run("float32"))


@pytest.mark.issue("keras#19332")
@helpers.in_both
def test_raw_columns_of_several_inputs_are_exact_where_they_are_normalized(mode):
    def run(mode):
        with helpers.enabled(mode):
            year, price = keras.Input((1,)), keras.Input((1,))
            both = layers.Concatenate()([year, price])[:, ::-1][:, ::-1]
            scale = layers.Normalization(mean=[2021.0, 2e5], variance=[324.0, 1e8])
            model = keras.Model([year, price], scale(both))
            return model.predict([YEARS, YEARS * 100], verbose=0)

    np.testing.assert_array_equal(run(mode), run("float32"))
