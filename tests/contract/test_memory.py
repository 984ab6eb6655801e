"""What a training step holds, computed: beside what is known, and what is measured."""

import gc

import helpers
import keras
import models
import numpy as np
import pytest
import tensorflow as tf
import workers

import tfamp

L = keras.layers


def blocks(optimizer="adam", **keywords):
    """Four blocks of 64 to 2,048 and back; 1.05 million parameters."""
    x = inputs = keras.Input((64,))
    for number in range(4):
        body = [L.Dense(2048, "relu", name=f"up_{number}"), L.Dense(64, name="down")]
        x = keras.Sequential([keras.Input((64,)), *body], name=f"block_{number}")(x)
    model = keras.Model(inputs, L.Dense(1, dtype="float32", name="head")(x), name="m")
    model.compile(optimizer, "mse", **keywords)
    return model


def batch(size=1024):
    return np.ones((size, 64), "float32"), np.ones((size, 1), "float32")


def found(mode="float32", remat=None, size=1024, **keywords):
    with helpers.enabled(mode, remat=remat, **keywords):
        return tfamp.memory(blocks(), batch(size))


def test_weights_slots_and_inputs_are_those_of_the_model():
    report, parameters = found(), blocks().count_params()
    assert report.weights == 4 * parameters
    assert 8 * parameters <= report.optimizer <= 8 * parameters + 64
    assert report.inputs == 1024 * 65 * 4
    assert report.total == sum(getattr(report, k) for k in kinds())
    assert "activations" in str(report) and str(report.batch_size) in str(report)


def kinds():
    fields = ("weights", "gradients", "optimizer", "activations", "inputs")
    return (*fields, "temporaries")


def test_activations_are_those_that_the_backward_pass_needs():
    report = found()
    # ReLU's outputs of 1024 x 2048 in each block, and their outputs of 1024 x 64.
    wide = 1024 * 2048 * 4
    assert report.layers["block_1/up_1"] >= wide
    assert 4 * wide <= report.activations <= 4.3 * wide


def test_16_bits_halve_activations_and_computing_again_leaves_one_block():
    whole, half = found(), found("mixed_bfloat16")
    # With the weights in bfloat16, which are kept for the backward pass, too.
    assert half.activations == pytest.approx(whole.activations / 2, rel=0.15)
    assert half.weights == whole.weights
    again = found(remat=[r"block_\d"])
    assert again.activations < 0.35 * whole.activations
    assert again.total < whole.total


@pytest.mark.parametrize(
    ("state", "bytes_"), [("8bit", 2.01), *helpers.whole_runs([("bfloat16", 4)])]
)
def test_slots_and_weights_are_counted_as_they_are_stored(state, bytes_):
    kept, whole = found(optimizer_state=state), found()
    assert kept.optimizer == pytest.approx(bytes_ * whole.weights / 4, rel=0.05)
    low = found("mixed_bfloat16", optimizer_state=state, weights="bfloat16")
    assert low.weights == pytest.approx(whole.weights / 2, rel=0.03)


def test_an_update_in_8_bits_holds_the_gradient_of_an_embedding_as_a_whole():
    """And its squares: XLA does not join sums of rows with what takes them."""
    ids = keras.Input((4,), dtype="int32")
    rows = L.GlobalAveragePooling1D()(L.Embedding(4096, 64)(ids))
    with helpers.enabled("float32", optimizer_state="8bit"):
        model = keras.Model(ids, L.Dense(1)(rows))
        model.compile("adam", "mse", jit_compile=False)
        report = tfamp.memory(model, (np.zeros((8, 4), "int32"), np.zeros((8, 1))))
    table = 4 * 4096 * 64
    # Both, the new weights and the new codes.
    assert report.temporaries == pytest.approx(3.5 * table, rel=0.05)


def test_it_grows_with_the_batch_and_changes_nothing():
    assert found(size=2048).activations == 2 * found(size=1024).activations
    model = blocks()
    before = [each.numpy() for each in model.weights]
    tfamp.memory(model, batch())
    helpers.assert_equal(model.weights, before)
    assert int(model.optimizer.iterations) == 0
    twin = blocks()
    twin.set_weights(before)
    losses = [m.fit(*batch(64), verbose=0).history["loss"] for m in (model, twin)]
    assert losses[0] == losses[1]


@pytest.mark.device
@pytest.mark.requires_gpu
@pytest.mark.parametrize("mode", ["float32", "mixed_bfloat16"])
def test_it_is_near_the_peak_of_a_gpus_allocator(mode):
    """After the first fit, in which cuBLAS and cuDNN try kernels with workspaces."""
    info = tf.config.experimental.get_memory_info
    gc.collect()
    before = info("GPU:0")["current"]
    with helpers.enabled(mode):
        model = blocks(jit_compile=False)
        computed = tfamp.memory(model, batch(8192)).total
        data = tf.data.Dataset.from_tensors(batch(8192)).repeat()
        for _ in range(2):
            tf.config.experimental.reset_memory_stats("GPU:0")
            model.fit(data, steps_per_epoch=4, verbose=0, shuffle=False)
    assert computed == pytest.approx(info("GPU:0")["peak"] - before, rel=0.2)


def test_under_xla_it_is_what_xla_holds():
    model = blocks(jit_compile=True)
    report, half = tfamp.memory(model, batch()), tfamp.memory(model, batch(512))
    # At least what each ReLU gives to the backward pass: 1024 x 2048.
    assert report.temporaries >= 4 * 1024 * 2048 * 4
    assert report.temporaries == pytest.approx(2 * half.temporaries, rel=0.1)
    assert report.activations == report.gradients == report.workspaces == 0
    assert report.bound == report.total == report.to_dict()["bound"]
    assert {f"block_{number}/up_{number}" for number in range(4)} <= {*report.layers}
    assert "XLA's own analysis" in str(report)


def test_where_xla_does_not_compile_it_says_that_it_estimates():
    model = keras.Sequential([keras.Input((64,)), models.OnHost(), L.Dense(1)])
    model.compile("sgd", "mse", jit_compile=True)
    report = tfamp.memory(model, batch())
    (note,) = (x for x in report.notes if "estimate" in x)
    assert "PyFunc" in note and report.total > report.inputs


class Custom(keras.Model):
    """A model whose `train_step`, branch and loop are its own."""

    def __init__(self):
        super().__init__()
        self.inner = L.Dense(256, "relu")
        self.head = L.Dense(1, dtype="float32")

    def call(self, x):
        return self.head(self.inner(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        tf.cond(
            loss < 1e9,
            lambda: self.optimizer.apply(gradients, self.trainable_variables),
            lambda: None,
        )
        return {"loss": loss}


@pytest.mark.parametrize("mode", ["float32", "mixed_float16"])
def test_a_custom_step_with_branches(mode):
    with helpers.enabled(mode):
        model = Custom()
        model(np.ones((2, 64), "float32"))
        model.compile("sgd")
        report = tfamp.memory(model, batch())
    size = 2 if "16" in mode else 4
    assert report.layers[model.inner.path] >= 1024 * 256 * size
    assert report.total > report.activations > 0


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: L.Dense(1), TypeError, "keras.Model"),
        (lambda: keras.Sequential([L.Dense(1)]), ValueError, "not built"),
        (lambda: keras.Sequential([keras.Input((2,)), L.Dense(1)]), ValueError, "comp"),
    ],
)
def test_bad_input(make, error, words):
    with pytest.raises(error, match=words):
        tfamp.memory(make(), batch())


def on_two_replicas():
    with tf.distribute.MirroredStrategy().scope():
        model = blocks()
    with pytest.raises(ValueError, match="a model of 2 replicas") as error:
        tfamp.memory(model, batch())
    return str(error.value)


def test_batches_that_fit_takes_are_taken():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    x, y = tf.zeros((8, 4)), tf.zeros((8, 2))
    assert tfamp.memory(model, (x, y, tf.constant(2.0))).total > 0
    assert tfamp.memory(model, (x, y[:1])).total > 0
    model.compile("sgd", lambda y, scores: tf.reduce_mean(scores[::2] - scores[1::2]))
    assert tfamp.memory(model, (x, y[:4])).total > 0


def test_several_replicas_are_refused():
    (said,) = workers.run(on_two_replicas, workers=1, cpus=2)
    assert "outside of a strategy" in said


def test_the_picture_has_each_kind_and_layer():
    report = found()
    figure = report.figure(again=found(remat=[r"block_\d"]))
    (legend,), (upper, lower) = figure.legends, figure.axes
    assert [x.get_text() for x in legend.get_texts()] == [*kinds()]
    assert [x.get_text() for x in upper.get_yticklabels()] == ["m", "again"]
    assert [x.get_text() for x in lower.get_yticklabels()] == [*report.layers][:20]
