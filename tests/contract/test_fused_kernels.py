"""Where Keras runs the fused kernels, and where it keeps its own."""

import re

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

X = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")
Y = np.ones((32, 2), "float32")
# Layer normalization from Keras 3.11 on; docs/maintainers/versions.md.
NORMALIZES = hasattr(keras.ops, "layer_normalization")
LAYERS = {"activation", "layer_normalization"} if NORMALIZES else {"activation"}
TRAINING = {*LAYERS, "dropout", "adam"}
OVERRIDES = {"dense.*": "mixed_bfloat16"}
# Models of the mode before are meant to keep it.
pytestmark = pytest.mark.filterwarnings("ignore:.*were built before")
_graphs = []


class Look(keras.layers.Layer):
    """Keeps the graphs that it is traced in."""

    def call(self, x):
        if not tf.executing_eagerly():
            _graphs.append(tf.compat.v1.get_default_graph())
        return x


def kernels_in(graph):
    """Names of the fused kernels in a graph and its functions."""
    definition = graph.as_graph_def()
    functions = definition.library.function
    compiled = [f.signature.name for f in functions if f.attr["_XlaMustCompile"].b]
    found = {re.sub(r"__(inference|forward)_|_\d+$", "", name) for name in compiled}
    nodes = [*definition.node, *(n for f in functions for n in f.node_def)]
    found |= {"adam" for node in nodes if node.op == "ResourceApplyAdam"}
    return found & TRAINING


def used():
    """Names of the fused kernels in what was traced since the last call."""
    found = set().union(*map(kernels_in, _graphs))
    _graphs.clear()
    return found


def build(activation="gelu", rate=0.5):
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, activation=activation)(inputs)
    x = keras.layers.LayerNormalization()(Look()(x))
    x = keras.layers.Dropout(rate, seed=3)(x)
    return keras.Model(inputs, keras.layers.Dense(2, dtype="float32")(x))


def compiled(optimizer="adam", **keywords):
    keras.utils.set_random_seed(0)
    model = build()
    model.compile(optimizer, "mse", **keywords)
    _graphs.clear()
    return model


@pytest.mark.issue("keras#20003")
def test_training_evaluation_and_prediction_use_them():
    with helpers.enabled("mixed_bfloat16"):
        model = compiled()
        model.fit(X, Y, verbose=0)
        assert used() == TRAINING
        model.evaluate(X, Y, verbose=0)
        assert used() == LAYERS
        model.predict(X, verbose=0)
        assert used() == LAYERS
        assert hasattr(model.make_predict_function(), "get_concrete_function")


@pytest.mark.parametrize(
    ("mode", "keywords", "expected"),
    [
        ("float32", {}, set()),
        ("mixed_bfloat16", {"fused_kernels": False}, set()),
        ("mixed_bfloat16", {"graph_rewrite": True}, {"adam"}),
        ("float32", {"fused_kernels": True}, {"adam"}),
        ("float32", {"overrides": OVERRIDES}, {"activation", "adam"}),
    ],
    ids=["float32", "switched off", "graph rewrite", "on request", "16-bit layers"],
)
def test_they_go_with_layers_that_compute_in_16_bits(mode, keywords, expected):
    with helpers.enabled(mode, **keywords) as status:
        compiled().fit(X, Y, verbose=0)
        found = used()
        assert found == expected
        assert (status.fused_kernels == "off") == (expected == set())


def test_status_names_them_and_says_where():
    with helpers.enabled("mixed_bfloat16") as status:
        names = "dropout, GELU, SiLU", *["layer normalization"] * NORMALIZES
        names += "kernel gradients in one product", "Adam's update"
        assert status.fused_kernels.startswith(", ".join(names))
    assert tfamp.status().fused_kernels == "off"


def replicas():
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = compiled()
    model.fit(X, Y, verbose=0)


def lengths_that_vary():
    """XLA would compile each length anew."""
    inputs = keras.Input((None, 4))
    hidden = keras.layers.Dense(4, "gelu")(Look()(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1, dtype="float32")(hidden))
    model.compile("sgd", "mse")
    specs = tf.TensorSpec([2, None, 4]), tf.TensorSpec([2, None, 1])
    data = tf.data.Dataset.from_generator(
        lambda: ((np.ones((2, n, 4)), np.ones((2, n, 1))) for n in (3, 5)),
        output_signature=specs,
    )
    _graphs.clear()
    model.fit(data.repeat(), steps_per_epoch=2, verbose=0, shuffle=False)
    del _graphs[:-1]  # Keras 3.16 first traces one for the first length.


def rounded_much():
    """In float32, in which TensorFlow takes 1 - beta."""
    compiled(keras.optimizers.Adam(beta_2=0.9999999)).fit(X, Y, verbose=0)


STOCK = {
    "eager": (lambda: compiled(run_eagerly=True).fit(X, Y, verbose=0), set()),
    "XLA": (lambda: compiled(jit_compile=True).fit(X, Y, verbose=0), set()),
    "replicas": (replicas, set()),
    "lengths that vary": (lengths_that_vary, set()),
    "beta near 1": (rounded_much, TRAINING - {"adam"}),
}


@pytest.mark.parametrize(("fit", "expected"), STOCK.values(), ids=STOCK)
def test_keras_own_stays_where_a_kernel_is_not_for_it(fit, expected):
    with helpers.enabled("mixed_bfloat16"):
        fit()
    assert used() == expected


def test_exported_models_have_keras_own(tmp_path):
    with helpers.enabled("mixed_bfloat16"):
        model = compiled()
        model.fit(X, Y, verbose=0)
        model.predict(X, verbose=0)
        model.export(tmp_path / "saved", verbose=False)
    served = tf.saved_model.load(tmp_path / "saved").signatures["serving_default"]
    assert kernels_in(served.graph) == set()
    functions = served.graph.as_graph_def().library.function
    assert not any(each.attr["_XlaMustCompile"].b for each in functions)


def test_a_loop_of_ones_own_uses_them_where_layers_train():
    with helpers.enabled("mixed_bfloat16"):
        model = build()
        call = tf.function(lambda training: model(X, training=training))
        _graphs.clear()
        call(False)
        assert used() == set()
        call(True)
        assert used() == TRAINING - {"adam"}


def with_and_without(function):
    """What a function returns in bfloat16 without the kernels, and with them."""
    found = []
    for fused in (False, True):
        with helpers.enabled("mixed_bfloat16", fused_kernels=fused):
            found.append(function())
    return found


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_training_goes_as_without_them(optimizer):
    """Without dropout, whose numbers differ: to bfloat16's rounding."""

    def losses():
        keras.utils.set_random_seed(0)
        made = keras.optimizers.get(optimizer)
        made.learning_rate = 0.01
        few = {"run_eagerly": False, "epochs": 10, "shuffle": False}
        return helpers.fit(build(rate=0.0), X, Y, made, **few)

    plain, fused = with_and_without(losses)
    assert fused[-1] < 0.3 * fused[0]
    np.testing.assert_allclose(fused, plain, rtol=0.02)


def test_layers_after_dropout_draw_the_same_seeds():
    def states():
        model = compiled()
        model.fit(X, Y, verbose=0)
        return [v.numpy() for v in model.variables if "seed" in v.path]

    np.testing.assert_array_equal(*with_and_without(states))


@pytest.mark.parametrize("mode", ["mixed_float16", "mixed_bfloat16"])
def test_a_skipped_step_still_changes_nothing(mode):
    """Also where Adam's kernel stands behind the check."""
    with helpers.enabled(mode):
        scaled = tfamp.LossScaleOptimizer(
            keras.optimizers.Adam(0.1),
            **({} if mode == "mixed_float16" else {"initial_scale": 1.0}),
            jit_compile="auto" if mode == "mixed_float16" else False,
        )
        model = compiled(scaled)
        model.fit(X, Y, batch_size=32, verbose=0)
        assert "adam" in used()
        written = [*model.trainable_variables, *scaled.inner_optimizer.variables]
        before = [np.array(v) for v in written]
        model.fit(np.full_like(X, np.nan), Y, batch_size=32, verbose=0)
        assert int(scaled.skipped_steps.numpy()) >= 1
    helpers.assert_equal(written, before)


class FrozenAdam(keras.optimizers.Adam):
    """Assigns to no variable."""

    def assign_sub(self, variable, value):
        pass


def test_a_subclass_of_adam_keeps_its_own_assignments():
    with helpers.enabled("mixed_bfloat16"):
        model = compiled(FrozenAdam(0.1))
        before = model.get_weights()
        model.fit(X, Y, verbose=0)
    helpers.assert_equal(model.get_weights()[:4], before[:4])


def trained(layer, shape=(4, 6, 8)):
    """A layer's output in training, in bfloat16, without the kernels and with them."""
    x = np.random.default_rng(0).normal(size=shape).astype("float32")

    def output():
        built = layer()
        run = tf.function(lambda x: built(x, training=True))
        return np.asarray(run(x), "float32")

    return with_and_without(output)


NORMALIZATIONS = {
    "last axis": {},
    "first axis": {"axis": 1},
    "two axes": {"axis": (1, 2)},
    "no gamma": {"scale": False},
    "no beta": {"center": False},
}


@pytest.mark.issue("keras#20003")
@pytest.mark.parametrize("keywords", NORMALIZATIONS.values(), ids=NORMALIZATIONS)
def test_layer_normalization_equals_keras(keywords):
    plain, fused = trained(lambda: keras.layers.LayerNormalization(**keywords))
    np.testing.assert_allclose(fused, plain, atol=0.02)
    assert np.abs(plain).max() > 1


@pytest.mark.parametrize("noise_shape", [None, (4, 1, 8), (1, 8)])
def test_dropouts_noise_shape_shares_decisions(noise_shape):
    _, fused = trained(lambda: keras.layers.Dropout(0.5, noise_shape, seed=1))
    dropped = fused == 0
    assert 0.2 < dropped.mean() < 0.8
    shared = (dropped == dropped[:, :1]).all()
    assert shared == (noise_shape is not None)


def test_products_of_complex_numbers_keep_their_gradients():
    x = tf.complex(*np.random.default_rng(0).normal(size=(2, 2, 3, 4)))
    kernel = tf.complex(*np.random.default_rng(1).normal(size=(2, 4, 5)))
    run = helpers.value_and_gradient(
        lambda x, kernel: tf.reduce_sum(tf.abs(tf.matmul(x, kernel)) ** 2)
    )
    _, expected = run(x, kernel)
    with helpers.enabled("mixed_bfloat16"):
        _, found = run(x, kernel)
    helpers.assert_equal(found, expected, rtol=1e-7)


def test_every_step_drops_other_elements():
    with helpers.enabled("mixed_bfloat16"):
        layer = keras.layers.Dropout(0.5, seed=1)
        step = tf.function(lambda: layer(tf.ones([64], tf.bfloat16), training=True))
        masks = [np.asarray(step(), "float32") == 0 for _ in range(3)]
    assert all(
        0.1 < np.mean(a != b) < 0.9 for a, b in zip(masks[1:], masks, strict=False)
    )
