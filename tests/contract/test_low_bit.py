"""Slots of 8 bits and of bfloat16, and weights of bfloat16 that do not stall.

They train what float32 trains, up to roundings that are right in the mean; files hold
float32; a step that is skipped leaves them as they are, bit for bit.
"""

import functools

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
import workers
from sklearn import datasets

import tfamp

L = keras.layers
OPTIMIZERS = {
    "adamw": lambda: keras.optimizers.AdamW(1e-3, weight_decay=0.01, clipnorm=1.0),
    "adafactor": lambda: keras.optimizers.Adafactor(1e-2),
    "adagrad": lambda: keras.optimizers.Adagrad(1e-2),
    "lion": lambda: keras.optimizers.Lion(1e-4),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "rmsprop": lambda: keras.optimizers.RMSprop(1e-3),
}
if keras.__version__ >= "3.11":  # Keras 3.10's own fails.
    OPTIMIZERS["muon"] = lambda: keras.optimizers.Muon(1e-3)  # It looks at names.


def digits():
    given = datasets.load_digits()
    return (given.data / 16).astype("float32"), given.target


def compiled(optimizer="adamw", **keywords):
    keras.utils.set_random_seed(0)
    head = L.Dense(10, dtype="float32", name="head")
    body = [L.Dense(256, "relu", name=f"dense_{n}") for n in range(2)]
    model = keras.Sequential([keras.Input((64,)), *body, head], name="m")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(OPTIMIZERS[optimizer](), loss, **keywords)
    return model


def fitted(mode="float32", optimizer="adamw", epochs=3, jit=False, **asked):
    with helpers.enabled(mode, **asked):
        model = compiled(optimizer, jit_compile=jit)
        x, y = digits()
        history = model.fit(x, y, batch_size=64, epochs=epochs, verbose=0)
    return model, history.history["loss"]


@functools.cache
def losses_in_float32(optimizer):
    return fitted(optimizer=optimizer)[1]


def inner(optimizer):
    return getattr(optimizer, "inner_optimizer", optimizer)


def is_stored(variable):
    return hasattr(variable, "natives")


def held(variables):
    """Returns what is stored, as arrays."""
    found = [n for v in variables for n in getattr(v, "natives", [v.value])]
    return [tf.cast(n, tf.float32).numpy() for n in found]


def bytes_of(variables):
    found = [n for v in variables for n in getattr(v, "natives", [v.value])]
    return sum(n.shape.num_elements() * n.dtype.size for n in found)


# ---- Training ----


@pytest.mark.issue("keras-hub#1628", "keras#16497")
@pytest.mark.parametrize("state", ["8bit", "bfloat16"])
@pytest.mark.parametrize(
    "optimizer",
    helpers.names_of(
        OPTIMIZERS,
        ["adamw"],
        slow=OPTIMIZERS.keys() - {"adamw", "muon"},
        device=["adamw"],
    ),
)
def test_slots_in_fewer_bits_train_what_float32_does(optimizer, state, tmp_path):
    expected = losses_in_float32(optimizer)
    model, losses = fitted(optimizer=optimizer, optimizer_state=state)
    np.testing.assert_allclose(losses, expected, rtol=0.1)
    slots = [v for v in model.optimizer.variables if "_dense_1_kernel_" in v.name]
    assert all(is_stored(v) for v in slots if v.ndim > 1)
    kernel = model.get_layer("dense_1").kernel
    slots = [v for v in slots if v.shape == kernel.shape]
    most = {"8bit": 1.02, "bfloat16": 2}[state] * len(slots)
    assert 0 < bytes_of(slots) <= most * 256 * 256
    if optimizer == "momentum":
        tf.saved_model.save(model, str(tmp_path))
        x = digits()[0][:4]
        served = tf.saved_model.load(str(tmp_path)).signatures["serving_default"]
        (found,) = served(tf.constant(x)).values()
        np.testing.assert_allclose(found, model(x), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model with both in fewer bits; files of it; what two more epochs make of it."""
    folder = tmp_path_factory.mktemp("low")
    asked = {"optimizer_state": "8bit", "weights": "bfloat16"}
    model, losses = fitted("mixed_bfloat16", **asked)
    model.save(folder / "model.keras")
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(folder / "ckpt")
    before = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
    x, y = digits()
    model.fit(x, y, batch_size=64, epochs=2, verbose=0, shuffle=False)
    return folder, model, losses, before, asked


@pytest.mark.issue("tensorflow#58138")
def test_weights_of_bfloat16_train_and_are_known_everywhere(trained, tmp_path):
    _, model, losses, _, _ = trained
    _, expected = fitted("mixed_bfloat16")
    np.testing.assert_allclose(losses, expected, rtol=0.1)
    kernels = [model.get_layer(f"dense_{n}").kernel for n in range(2)]
    slots = [v for v in model.optimizer.variables if v.shape == kernels[1].shape]
    assert bytes_of([kernels[1], *slots]) <= 4.1 * 256 * 256
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(digits()[0][:8]))
    gradient = tape.gradient(loss, kernels[1])
    assert gradient.dtype == tf.bfloat16 and kernels[1].dtype == "float32"
    report = tfamp.export(model, tmp_path / "served", sample_inputs=digits()[0][:4])
    assert set(report.weight_bytes) == {"float32"}
    assert is_stored(kernels[1])  # As it was.
    compared = tfamp.compare_precision(model, digits()[0][:32], "mixed_bfloat16")
    assert compared.first_overflow is None and compared.rows
    if keras.__version__ >= "3.16":  # It exports what is stored.
        model.export(tmp_path / "plain", verbose=False)
        served = tf.saved_model.load(tmp_path / "plain")
        predicted = model.predict(digits()[0][:32], verbose=0)
        np.testing.assert_allclose(served.serve(digits()[0][:32]), predicted, 1e-2)
        return
    with pytest.raises(ValueError, match="Use `tfamp.export`"):
        model.export(tmp_path / "plain", verbose=False)


@pytest.mark.issue("tf-keras#420")
def test_files_hold_float32_and_training_goes_on_exactly(trained):
    folder, model, _, before, asked = trained
    x, y = digits()
    loaded = keras.models.load_model(folder / "model.keras")
    assert type(loaded.optimizer) is keras.optimizers.AdamW
    helpers.assert_equal([*loaded.variables, *loaded.optimizer.variables], before)
    with helpers.enabled("mixed_bfloat16", **asked):
        again = keras.models.load_model(folder / "model.keras")
        again.fit(x, y, batch_size=64, epochs=2, verbose=0, shuffle=False)
    variables = [*model.variables, *model.optimizer.variables]
    helpers.assert_equal(
        held(variables), held([*again.variables, *again.optimizer.variables])
    )
    plain = compiled()
    plain.optimizer.build(plain.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=plain, optimizer=plain.optimizer)
    checkpoint.read(str(folder / "ckpt"))
    helpers.assert_equal([*plain.variables, *plain.optimizer.variables], before)


def test_a_model_with_weights_of_bfloat16_is_compiled_again():
    model, losses = fitted("mixed_bfloat16", epochs=1, weights="bfloat16")
    with helpers.enabled("mixed_bfloat16", weights="bfloat16"):
        data = *digits(), keras.optimizers.Adam(1e-3), model.loss
        again = helpers.fit(model, *data, batch_size=64)
    assert is_stored(model.layers[0].kernel) and again[-1] < losses[-1]


def test_a_loop_of_ones_own_stores_them_too():
    x, y = digits()
    losses = []
    for state in ("float32", "8bit"):
        model = compiled("adamw")
        optimizer = tfamp.LossScaleOptimizer(OPTIMIZERS["adamw"]())
        assert tfamp.low_bit(optimizer, state) is optimizer
        for start in range(0, 640, 64):
            rows = slice(start, start + 64)
            with tf.GradientTape() as tape:
                loss = model.compute_loss(y=y[rows], y_pred=model(x[rows]))
                scaled = optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
        losses.append(float(loss))
    assert losses[0] == pytest.approx(losses[1], rel=0.1)
    assert optimizer.inner_optimizer.iterations == 10
    tfamp.low_bit(optimizer, "float32")  # Back, built as it is.
    slots = optimizer.inner_optimizer.variables
    assert not any(is_stored(v) for v in slots)


@pytest.mark.device
def test_updates_of_a_fraction_of_a_step_move_weights_of_bfloat16():
    """The known stall: 2**-10 of a weight is less than half a step of bfloat16."""
    moved = {}
    for weights in ("bfloat16", "float32"):
        with helpers.enabled("mixed_bfloat16", weights=weights):
            layer = L.Dense(64, kernel_initializer="ones", use_bias=False)
            model = keras.Sequential([keras.Input((64,)), layer, L.Dense(1)])
            model.layers[1].trainable = False
            loss = lambda y_true, y_pred: tf.reduce_mean(y_pred)  # noqa: E731
            model.compile(keras.optimizers.SGD(1.0), loss)
            model.layers[1].kernel.assign(tf.fill((64, 1), 2.0**-10))
            ones = np.ones((256, 64), "float32")
            model.fit(ones, ones[:, :1], batch_size=1, verbose=0)
            moved[weights] = float(np.mean(layer.kernel.numpy()))
    assert moved["float32"] == pytest.approx(0.75, abs=1e-3)
    assert moved["bfloat16"] == pytest.approx(0.75, abs=0.02)


# ---- Skipped steps ----


@pytest.mark.device
@pytest.mark.parametrize("jit", helpers.names_of([False, True], quick=[False]))
def test_a_skipped_step_leaves_codes_and_scales_alone(jit):
    model, _ = fitted("mixed_float16", optimizer_state="8bit", epochs=1, jit=jit)
    variables = [*model.trainable_variables, *inner(model.optimizer).variables]
    before = held(variables)
    x, y = digits()
    model.train_on_batch(np.full_like(x[:64], np.inf), y[:64])
    assert int(model.optimizer.skipped_steps.numpy()) >= 1
    helpers.assert_equal(held(variables), before)
    model.train_on_batch(x[:64], y[:64])
    assert any((a != b).any() for a, b in zip(held(variables), before, strict=True))


def on_replicas():
    """Trains over two replicas; returns what each holds, before and after a skip."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    found = {}
    cases = {"mixed_float16": {}, "mixed_bfloat16": {"weights": "bfloat16"}}
    for mode, more in cases.items():
        with helpers.enabled(mode, optimizer_state="8bit", **more):
            with strategy.scope():
                model = compiled(jit_compile=False)
            x, y = digits()
            history = model.fit(x, y, batch_size=64, epochs=2, verbose=0)
            variables = [*model.trainable_variables, *inner(model.optimizer).variables]
            natives = [n for v in variables for n in getattr(v, "natives", [v.value])]
            large = [n for n in natives if n.shape.num_elements() > 4096]

            def sums(large=large):
                parts = [strategy.experimental_local_results(n) for n in large]
                cast = lambda x: tf.cast(x, tf.float32)  # noqa: E731
                return [[float(tf.reduce_sum(cast(x))) for x in p] for p in parts]

            before = sums()
            if mode == "mixed_float16":
                x = np.concatenate([np.full_like(x[:32], np.inf), x[:32]])
                model.fit(x, y[:64], batch_size=64, verbose=0)
            found[mode] = history.history["loss"], before, sums()
    return found


@pytest.mark.training
def test_replicas_hold_the_same_codes():
    (found,) = workers.run(on_replicas, workers=1, cpus=2)
    for mode, (losses, before, after) in found.items():
        assert losses[1] < 0.6 * losses[0], mode
        assert len(before) >= 5 and all(a == b for a, b in before), mode
        assert mode == "mixed_bfloat16" or before == after


# ---- Asked, told, and refused ----


def low_bit_of_a_layer(state):
    """Returns a built optimizer, and its weights."""
    layer = L.Dense(256)
    layer.build((None, 64))
    optimizer = tfamp.low_bit(keras.optimizers.AdamW(), state)
    optimizer.build(layer.trainable_variables)
    return optimizer, layer.trainable_variables


@pytest.mark.parametrize("state, stored", [("8bit", "u8["), ("bfloat16", "bf16[")])
def test_xla_sees_no_dynamic_shape(state, stored):
    """With one it inlines all calls; a step with dropout takes six times as long."""
    optimizer, weights = low_bit_of_a_layer(state)

    @tf.function(jit_compile=True)
    def step(*gradients):
        optimizer.apply(gradients)

    gradients = [tf.ones(v.shape) for v in weights]
    program = step.experimental_get_compiler_ir(*gradients)(stage="hlo")
    assert stored in program and "dimension-size" not in program


@pytest.mark.parametrize("state", ["8bit", "bfloat16"])
def test_a_shape_that_a_graph_does_not_know_is_checked_when_it_runs(state):
    optimizer, _ = low_bit_of_a_layer(state)
    slot = next(filter(is_stored, optimizer.variables))

    @tf.function(input_signature=[tf.TensorSpec((None, None))])
    def assign(value):
        slot.assign(value)

    assign(tf.ones((64, 256)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="shape"):
        assign(tf.zeros((1, 256)))  # It would be broadcast.
    assert np.all(slot.numpy() == 1)


def test_status_tells_and_disable_leaves_what_is_compiled():
    with helpers.enabled("mixed_bfloat16", optimizer_state="8bit", weights="bfloat16"):
        told = tfamp.status().full()
        model = compiled()
    assert "optimizer state:" in told and "8bit" in told
    x, y = digits()
    model.fit(x, y, verbose=0)
    assert any(is_stored(v) for v in model.optimizer.variables)
    assert not any(is_stored(v) for v in model.variables)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: tfamp.enable(optimizer_state="4bit"), "4bit"),
        (lambda: tfamp.enable("float32", weights="bfloat16"), "mixed_bfloat16"),
        (lambda: tfamp.enable(weights="float16"), "'float32' or 'bfloat16'"),
        (lambda: tfamp.low_bit(keras.optimizers.Ftrl()), "Ftrl has state"),
        (lambda: tfamp.low_bit(keras.optimizers.RMSprop(centered=True)), "centered"),
    ],
)
def test_what_cannot_be_stored_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()
    assert tfamp.status().requested is None


@pytest.mark.parametrize("summed", [False, True])
def test_gradients_of_an_embedding_are_accumulated_in_float32(summed):
    given = {"sum_embedding_gradients": summed, "optimizer_state": "8bit"}
    with helpers.enabled("mixed_bfloat16", weights="bfloat16", **given):
        table, head = L.Embedding(512, 16), L.Dense(1, dtype="float32")
        model = keras.Sequential([keras.Input((4,)), table, L.Flatten(), head])
        optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
        model.compile(optimizer, "mse", jit_compile=False)
        ids = np.random.default_rng(0).integers(0, 512, (64, 4))
        history = model.fit(ids, ids[:, 0] % 2, epochs=20, batch_size=16, verbose=0)
    assert is_stored(table.embeddings)
    assert history.history["loss"][-1] < 0.5 * history.history["loss"][0]


def test_weights_that_averages_overwrite_are_refused():
    with helpers.enabled("mixed_bfloat16", weights="bfloat16"):
        model = compiled()
        optimizer = keras.optimizers.SGD(use_ema=True)
        model.compile(optimizer, model.loss)
        with pytest.raises(ValueError, match="use_ema=True"):
            model.fit(*digits(), verbose=0)


class Delegating(keras.optimizers.Optimizer):
    """A user's own, that has another one make its updates."""

    def __init__(self, inner):
        super().__init__(learning_rate=0.01)
        self.inner_optimizer = inner

    def build(self, variables):
        self.inner_optimizer.build(variables)
        super().build(variables)

    def update_step(self, gradient, variable, learning_rate):
        self.inner_optimizer.update_step(gradient, variable, learning_rate)


def test_an_optimizer_inside_of_a_user_s_own_is_left_alone():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    x = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
    optimizer = tfamp.low_bit(Delegating(keras.optimizers.Adam()), "8bit")
    losses = helpers.fit(model, x, x * 0, optimizer, epochs=3)
    assert losses[-1] < losses[0]
