"""Where Keras runs the fused kernels, and where it keeps its own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.kernels import keras_kernels


def build(activation="gelu", rate=0.5):
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, activation=activation)(inputs)
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.Dropout(rate, seed=3)(x)
    return keras.Model(inputs, keras.layers.Dense(2, dtype="float32")(x))


def compiled(optimizer="adam", **keywords):
    keras.utils.set_random_seed(0)
    model = build()
    model.compile(optimizer, "mse", **keywords)
    return model


X = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")
Y = np.ones((32, 2), "float32")


def spied(seen, name, original):
    def spy(*args, **kwargs):
        seen.append(name)
        return original(*args, **kwargs)

    return spy


@pytest.fixture
def calls(monkeypatch):
    """Names of the fused kernels that were traced."""
    seen = []
    for module, name in (
        (keras_kernels.fused_ops, "gelu"),
        (keras_kernels.fused_ops, "silu"),
        (keras_kernels.fused_ops, "dropout"),
        (keras_kernels.fused_ops, "layer_normalization"),
        (keras_kernels.fused_adam, "apply"),
        (keras_kernels.fused_adam, "clip_by_global_norm"),
    ):
        monkeypatch.setattr(module, name, spied(seen, name, getattr(module, name)))
    return seen


EVERYWHERE = {"gelu", "layer_normalization"}
TRAINING = {*EVERYWHERE, "dropout", "apply"}


def test_training_evaluation_and_prediction_use_them(calls):
    with tfamp.control.enabled("mixed_bfloat16"):
        model = compiled(keras.optimizers.Adam(global_clipnorm=1.0))
        assert calls == []  # Building a model runs nothing.
        model.fit(X, Y, verbose=0)
        assert set(calls) == {*TRAINING, "clip_by_global_norm"}
        calls.clear()
        model.evaluate(X, Y, verbose=0)
        assert set(calls) == EVERYWHERE
        calls.clear()
        model.predict(X, verbose=0)
        assert set(calls) == EVERYWHERE


@pytest.mark.parametrize("mode", ["float32", "mixed_bfloat16"])
def test_float32_keeps_keras_own(calls, mode):
    with tfamp.control.enabled(mode) as status:
        compiled().fit(X, Y, verbose=0)
        mixed = mode == "mixed_bfloat16"
        assert bool(calls) == mixed
        assert (status.fused_kernels != "off") == mixed


def test_an_override_to_16_bits_brings_them(calls):
    overrides = {"dense.*": "mixed_bfloat16"}
    with tfamp.control.enabled("float32", overrides=overrides):
        compiled().fit(X, Y, verbose=0)
    assert "gelu" in calls


def test_they_can_be_switched_off(calls):
    with tfamp.control.enabled("mixed_bfloat16", fused_kernels=False) as status:
        compiled().fit(X, Y, verbose=0)
        assert status.fused_kernels == "off"
    assert calls == []


def test_enable_refuses_what_is_no_bool():
    with pytest.raises(TypeError, match="fused_kernels='yes'"):
        tfamp.enable(fused_kernels="yes")
    assert not keras_kernels.installed()


@pytest.mark.parametrize(
    "keywords", [{"run_eagerly": True}, {"jit_compile": True}], ids=["eager", "XLA"]
)
def test_eager_and_xla_steps_keep_keras_own(calls, keywords):
    with tfamp.control.enabled("mixed_bfloat16"):
        compiled(**keywords).fit(X, Y, verbose=0)
    assert calls == []


def test_replicas_keep_keras_own(calls):
    with tfamp.control.enabled("mixed_bfloat16"):
        with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
            model = compiled()
        model.fit(X, Y, verbose=0)
    assert calls == []


def test_lengths_that_vary_keep_keras_own(calls):
    """XLA would compile each length anew."""
    with tfamp.control.enabled("mixed_bfloat16"):
        inputs = keras.Input((None, 4))
        hidden = keras.layers.Dense(4, "gelu")(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1, dtype="float32")(hidden))
        model.compile("sgd", "mse")
        data = tf.data.Dataset.from_generator(
            lambda: ((np.ones((2, n, 4)), np.ones((2, n, 1))) for n in (3, 5)),
            output_signature=(
                tf.TensorSpec([2, None, 4]),
                tf.TensorSpec([2, None, 1]),
            ),
        )
        model.fit(data.repeat(), steps_per_epoch=2, verbose=0, shuffle=False)
    assert calls == []


def test_exported_models_have_keras_own(tmp_path):
    with tfamp.control.enabled("mixed_bfloat16"):
        model = compiled()
        model.fit(X, Y, verbose=0)
        model.predict(X, verbose=0)
        model.export(tmp_path / "saved", verbose=False)
    served = tf.saved_model.load(tmp_path / "saved").signatures["serving_default"]
    nodes = [
        *served.graph.as_graph_def().node,
        *(
            node
            for function in served.graph.as_graph_def().library.function
            for node in function.node_def
        ),
    ]
    assert {"Erfc", "Erf"} & {node.op for node in nodes}
    assert not any(node.attr["_XlaMustCompile"].b for node in nodes)


def test_a_loop_of_ones_own_uses_them_where_layers_train(calls):
    with tfamp.control.enabled("mixed_bfloat16"):
        model = build()

        @tf.function
        def call(training):
            return model(X, training=training)

        call(False)
        assert calls == []
        call(True)
        assert set(calls) == TRAINING - {"apply"}


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_training_goes_as_without_them(optimizer):
    """Without dropout, whose numbers differ: to bfloat16's rounding."""
    losses = {}
    for fused in (False, True):
        with tfamp.control.enabled("mixed_bfloat16", fused_kernels=fused):
            keras.utils.set_random_seed(0)
            model = build(rate=0.0)
            model.compile(optimizer, "mse", run_eagerly=False)
            model.optimizer.learning_rate = 0.01
            history = model.fit(X, Y, epochs=10, verbose=0, shuffle=False)
            losses[fused] = history.history["loss"]
    assert losses[True][-1] < 0.3 * losses[True][0]
    np.testing.assert_allclose(losses[True], losses[False], rtol=0.02)


def test_layers_after_dropout_draw_the_same_seeds():
    states = []
    for fused in (False, True):
        with tfamp.control.enabled("mixed_bfloat16", fused_kernels=fused):
            model = compiled()
            model.fit(X, Y, verbose=0)
            states.append([v.numpy() for v in model.variables if "seed" in v.path])
    np.testing.assert_array_equal(states[0], states[1])


def test_a_skipped_step_still_changes_nothing(calls):
    with tfamp.control.enabled("mixed_float16"):
        model = compiled()
        model.fit(X, Y, batch_size=32, verbose=0)
        before = [w.copy() for w in model.get_weights()]
        slots = [np.asarray(v) for v in model.optimizer.inner_optimizer.variables]
        bad = np.full_like(X, np.nan)
        model.fit(bad, Y, batch_size=32, verbose=0)
        assert int(model.optimizer.skipped_steps.numpy()) >= 1
    assert "gelu" in calls
    trained = {v.path for v in model.trainable_variables}
    assert len(trained) == 6
    for variable, old in zip(model.weights, before, strict=True):
        if variable.path in trained:
            np.testing.assert_array_equal(variable, old)
    for variable, old in zip(
        model.optimizer.inner_optimizer.variables, slots, strict=True
    ):
        np.testing.assert_array_equal(variable, old)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_sparse_embedding_gradients_are_clipped_and_applied(dtype):
    results = []
    ids = np.array([[1, 1, 2], [0, 2, 2]])
    for fused in (False, True):
        with tfamp.control.enabled(dtype, fused_kernels=fused):
            keras.utils.set_random_seed(1)
            model = keras.Sequential(
                [
                    keras.Input((3,), dtype="int32"),
                    keras.layers.Embedding(5, 4),
                    keras.layers.Flatten(),
                    keras.layers.Dense(1, dtype="float32"),
                ]
            )
            model.compile(keras.optimizers.Adam(0.1, global_clipnorm=0.5), "mse")
            model.fit(ids, np.ones((2, 1)), epochs=5, verbose=0)
            results.append(model.layers[0].embeddings.numpy())
    np.testing.assert_allclose(results[1], results[0], atol=2e-3)
    assert np.ptp(results[0]) > 0.1


def test_installing_twice_and_removing_restores_keras():
    before = [vars(owner)[name] for owner, name, _ in keras_kernels._places()]
    keras_kernels.install()
    keras_kernels.install()
    assert keras_kernels.installed()
    keras_kernels.remove()
    keras_kernels.remove()
    after = [vars(owner)[name] for owner, name, _ in keras_kernels._places()]
    assert all(a is b for a, b in zip(after, before, strict=True))


class FrozenAdam(keras.optimizers.Adam):
    """Assigns to no variable."""

    def assign_sub(self, variable, value):
        pass


def test_a_subclass_of_adam_keeps_its_own_assignments():
    with tfamp.control.enabled("mixed_bfloat16"):
        model = compiled(FrozenAdam(0.1))
        before = model.get_weights()
        model.fit(X, Y, verbose=0)
    for old, new in zip(before[:4], model.get_weights()[:4], strict=True):
        np.testing.assert_array_equal(old, new)


def test_betas_that_float32_rounds_much_keep_keras_own(calls):
    with tfamp.control.enabled("mixed_bfloat16"):
        compiled(keras.optimizers.Adam(beta_2=0.9999999)).fit(X, Y, verbose=0)
    assert "apply" not in calls and "gelu" in calls


def trained(layer, shape=(4, 6, 8)):
    """A layer's output in training, in bfloat16, with and without the kernels."""
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    outputs = []
    for fused in (False, True):
        with tfamp.control.enabled("mixed_bfloat16", fused_kernels=fused):
            built = layer()
            function = tf.function(lambda x, built=built: built(x, training=True))
            outputs.append(np.asarray(function(x), "float32"))
    return outputs


NORMALIZATIONS = {
    "last axis": {},
    "first axis": {"axis": 1},
    "two axes": {"axis": (1, 2)},
    "no gamma": {"scale": False},
    "no beta": {"center": False},
}


@pytest.mark.parametrize("keywords", NORMALIZATIONS.values(), ids=NORMALIZATIONS)
def test_layer_normalization_equals_keras(keywords):
    plain, fused = trained(lambda: keras.layers.LayerNormalization(**keywords))
    np.testing.assert_allclose(fused, plain, atol=0.02)
    assert np.abs(plain).max() > 1


@pytest.mark.parametrize("noise_shape", [None, (4, 1, 8), (1, 8), (None, 1, 8)])
def test_dropouts_noise_shape_shares_decisions(noise_shape):
    _, fused = trained(lambda: keras.layers.Dropout(0.5, noise_shape, seed=1))
    dropped = fused == 0
    assert 0.2 < dropped.mean() < 0.8
    shared = (dropped == dropped[:, :1]).all()
    assert shared == (noise_shape is not None)


def test_every_step_drops_other_elements():
    with tfamp.control.enabled("mixed_bfloat16"):
        layer = keras.layers.Dropout(0.5, seed=1)
        step = tf.function(lambda: layer(tf.ones([64], tf.bfloat16), training=True))
        masks = [np.asarray(step(), "float32") == 0 for _ in range(3)]
    assert all(
        0.1 < np.mean(a != b) < 0.9 for a, b in zip(masks[1:], masks, strict=False)
    )


def test_a_skipped_step_leaves_the_fused_update_out(calls):
    with tfamp.control.enabled("mixed_bfloat16"):
        adam = keras.optimizers.Adam(0.1)
        scaled = tfamp.LossScaleOptimizer(
            adam, initial_scale=1.0, dynamic=False, jit_compile=False
        )
        model = compiled(scaled)
        model.fit(X, Y, batch_size=32, verbose=0)
        assert "apply" in calls
        before = [np.asarray(v) for v in (*model.trainable_variables, *adam.variables)]
        model.fit(np.full_like(X, np.nan), Y, batch_size=32, verbose=0)
        assert int(scaled.skipped_steps.numpy()) == 1
        after = [np.asarray(v) for v in (*model.trainable_variables, *adam.variables)]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


def test_prediction_functions_stay_functions():
    with tfamp.control.enabled("mixed_bfloat16"):
        function = compiled().make_predict_function()
        assert hasattr(function, "get_concrete_function")
