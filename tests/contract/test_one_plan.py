"""One plan: what computes in what is the same whichever feature asks."""

import re
import threading
import traceback
from concurrent import futures

import helpers
import keras
import models
import numpy as np
import pytest
import tensorflow as tf
import workers
from keras import layers as L

import tfamp

pytestmark = pytest.mark.usefixtures("disabled")

in_both, policies = helpers.in_both, helpers.policies
X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")


class Layers(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.body, self.head = L.Dense(4, name="body"), L.Dense(1, name="head")

    def call(self, x):
        return self.head(self.body(x))


# ---- One table ----


def recurrent():
    steps = keras.Input((4, 3), name="steps")
    x = L.Bidirectional(L.LSTM(3, return_sequences=True, name="lstm"))(steps)
    return keras.Model(steps, L.Dense(2, name="head")(L.GRU(3, name="gru")(x)))


def wrappers():
    x = keras.Input((4, 3), name="x")
    y = L.TimeDistributed(L.Dense(3, name="dense"), name="each")(x)
    y = L.SpectralNormalization(L.Dense(3, name="inner"), name="norm")(y)
    return keras.Model(x, L.Dense(2, "softmax", name="head")(y))


def convolutional():
    image = keras.Input((8, 8, 3), name="image")
    x = L.Rescaling(1 / 255, name="scale")(image)
    x = L.DepthwiseConv2D(3, 2, name="strided")(L.Conv2D(4, 3, name="conv")(x))
    x = L.UpSampling2D(interpolation="bilinear", name="up")(x)
    x = L.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(image, L.Dense(2, "softmax", name="head")(x))


def nested():
    x = keras.Input((4,), name="x")
    inner = keras.Sequential([keras.Input((4,)), L.Dense(3, name="a")], name="inner")
    return keras.Model(x, L.Dense(2, name="head")(inner(x)))


def kerashub():
    hub = pytest.importorskip("keras_hub")
    backbone = hub.models.BertBackbone(
        vocabulary_size=16,
        num_layers=1,
        num_heads=2,
        hidden_dim=4,
        intermediate_dim=8,
        max_sequence_length=4,
        name="backbone",
    )
    return hub.models.BertTextClassifier(backbone, num_classes=2, name="classifier")


KINDS = {
    "functional": models.functional,
    "convolutional": convolutional,
    "subclassed": lambda: Layers(name="model"),
    "sequential": models.sequential,
    "nested": nested,
    "shared": models.shared,
    "wrappers": wrappers,
    "recurrent": recurrent,
    "attention": models.tokens,
    "normalized": models.normalized,
    "KerasHub": kerashub,
}


def built(make):
    """A model after its first call, and the batch of that."""
    model = make()
    batch = models.batch(model, rows=2)
    model(batch)
    return model, batch


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *helpers.whole_runs((kind, "mixed_bfloat16") for kind in KINDS),
        # Rules differ between the formats for layers of these.
        ("convolutional", "mixed_float16"),
        *helpers.whole_runs((k, "mixed_float16") for k in ("recurrent", "attention")),
    ],
)
def test_every_feature_has_the_same_table(kind, mode, tmp_path):
    make = KINDS[kind]
    plain, batch = built(make)
    found = tfamp.compare_precision(plain, batch, mode).layers
    exported = tfamp.export(
        *(plain, tmp_path / "plain", mode), sample_inputs=batch
    ).layers
    tfamp.set_precision(plain, mode)
    expected = tuple(tfamp.describe_layers(plain))
    keras.backend.clear_session()  # Names of layers are counted anew.
    tfamp.enable(mode)
    called, _ = built(make)
    compiled = make()
    compiled.compile("sgd", "mse")
    compiled(batch)
    for model in (called, compiled):
        assert _without_numbers(tfamp.describe_layers(model)) == _without_numbers(
            expected
        )
    assert found == exported == expected
    again = tfamp.export(*(called, tmp_path / "mixed", mode), sample_inputs=batch)
    assert again.layers == tuple(tfamp.describe_layers(called))
    assert {row.policy for row in expected} == {"float32", mode}


def _without_numbers(rows):
    """Keras counts layers that have no name of their own."""
    return [tuple(re.sub(r"_\d+(?=/|'|$)", "", text) for text in row) for row in rows]


# ---- Who calls a part, or another view, changes nothing of a model ----


def autoencoder():
    x = keras.Input((3,))
    code = L.Dense(4, name="code")(x)
    return keras.Model(x, L.Dense(3, name="out")(code), name="whole"), code


@in_both
def test_parts_and_views_that_are_called_change_nothing(mode):
    tfamp.enable(mode)
    whole, code = autoencoder()
    helpers.fit(whole, X, X)
    before = policies(whole)
    assert (before["code"], before["out"]) == (mode, "float32")
    expected = whole.predict(X, verbose=0)
    keras.Model(whole.input, code).predict(X, verbose=0)
    keras.Model(whole.input, [code, whole.output]).predict(X, verbose=0)
    assert policies(whole) == before
    np.testing.assert_array_equal(whole(X), expected)
    tfamp.set_precision(whole, mode, {"out": mode})
    keras.Model(whole.input, [code, whole.output]).predict(X, verbose=0)
    assert policies(whole)["out"] == mode


@in_both
def test_a_part_that_was_called_first_is_planned_with_the_whole(mode):
    tfamp.enable(mode)
    ends = L.Dense(4, name="a"), L.Dense(4, name="b")
    part = keras.Sequential([keras.Input((3,)), *ends], name="part")
    part.predict(X, verbose=0)
    assert policies(part)["part/b"] == "float32"  # It computes outputs of that alone.
    whole = keras.Sequential([part, L.Dense(1, name="head")], name="whole")
    helpers.fit(whole, X, Y)
    found = policies(whole)
    assert (found["whole/part/b"], found["whole/head"]) == (mode, "float32")
    assert found == {
        row.path: row.policy for row in tfamp.compare_precision(whole, X, mode).layers
    }


@in_both
def test_a_new_head_is_an_output_when_it_is_compiled_again(mode):
    tfamp.enable(mode)
    stack = [keras.Input((3,)), L.Dense(4, name="body"), L.Dense(3, name="old")]
    model = keras.Sequential(stack, name="m")
    helpers.fit(model, X, X)
    model.pop()
    model.add(L.Dense(1, name="new"))
    helpers.fit(model, X, Y)
    found = policies(model)
    assert (found["m/body"], found["m/new"]) == (mode, "float32")
    model.add(L.Dense(1, name="last"))
    model.compile("sgd", "mse")
    found = policies(model)
    assert (found["m/new"], found["m/last"]) == (mode, "float32")


class BuildsItself(L.Layer):
    """Builds a layer with a `dtype` of its own, and one without."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.wide = L.Dense(4, dtype="float32", name="wide")
        self.low = L.Dense(4, name="low")

    def build(self, shape):
        self.wide.build(shape)
        self.low.build(shape)

    def call(self, x):
        return self.low(x) + self.wide(x)


@in_both
def test_a_dtype_of_its_own_is_kept_and_the_time_of_making_is_none(mode):
    older, last = L.Dense(4, name="older"), L.Dense(1)
    tfamp.enable(mode)
    body = [BuildsItself(name="own"), L.Dense(1, name="head")]
    model = keras.Sequential([keras.Input((3,)), *body], name="m")
    helpers.fit(model, X, Y)
    expected = policies(model)
    assert (expected["m/own/wide"], expected["m/own/low"]) == ("float32", mode)
    tfamp.set_precision(model, mode)
    assert policies(model) == expected
    stack = keras.Sequential([keras.Input((3,)), older, last])
    with pytest.warns(UserWarning, match="built before"):
        stack.compile("sgd", "mse")
    tfamp.set_precision(stack, mode)
    assert older.dtype_policy.name == mode


class Positions(L.Layer):
    """Adds embeddings of positions to those of ids, which come as floats."""

    def __init__(self):
        super().__init__(name="both")
        self.ids, self.positions = L.Embedding(20000, 4), L.Embedding(5, 4)

    def call(self, x):
        places = keras.ops.arange(keras.ops.shape(x)[-1])
        return self.ids(x) + self.positions(places)


@in_both
def test_ids_pass_a_layer_that_holds_embeddings(mode):
    tfamp.enable(mode)
    ids = keras.Input((5,))
    x = L.GlobalAveragePooling1D()(Positions()(ids))
    model = keras.Model(ids, L.Dense(1)(x))
    model.compile("sgd", "mse")
    assert policies(model)["both"] == "float32"
    near = np.float32([[19998] * 5, [19999] * 5])
    assert np.ptp(model.predict(near, verbose=0)) > 0


class TakesIds(keras.Model):
    def __init__(self):
        super().__init__(name="m")
        self.table, self.head = L.Embedding(2000, 4, name="table"), L.Dense(1)

    def call(self, x):
        return self.head(tf.reduce_mean(self.table(x), 1))


@in_both
def test_what_a_call_showed_is_known_to_set_precision(mode):
    tfamp.enable(mode)
    model, ids = TakesIds(), np.float32([[1000], [1001]])
    model(ids)
    before = policies(model)
    tfamp.set_precision(model, mode)
    assert policies(model) == before and before["m"] == "float32"
    assert np.ptp(model(ids)) > 0


# ---- A search that passed is what `enable` does ----


def test_a_search_that_passed_holds_under_enable():
    def build():
        large = keras.initializers.Constant(3e4)
        head = L.Dense(1, kernel_initializer=large)
        return keras.Sequential([keras.Input((8,)), head], name="m")

    x = np.ones((4, 8), "float32")
    found = tfamp.search_precision(build(), [x] * 4, "mixed_float16")
    assert found.overrides == {} and found.held_out.error == 0
    tfamp.enable("mixed_float16", overrides=found.overrides)
    np.testing.assert_array_equal(build().predict(x, verbose=0), np.full((4, 1), 24e4))


# ---- Trained on exact values, served on exact values ----


@keras.saving.register_keras_serializable("tfamp_tests")
class Years(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.scale = L.Normalization()
        self.body = L.Dense(2, kernel_initializer="ones", use_bias=False)
        self.head = L.Dense(1, kernel_initializer="ones", use_bias=False)

    def call(self, x):
        return self.head(self.body(self.scale(x)))


@in_both
def test_a_file_has_what_raw_values_need_without_tfamp(mode, tmp_path):
    x, expected = np.float32([[2014], [2015]]), [[-2], [2]]
    tfamp.enable(mode)
    model = Years()
    model.scale.adapt(np.float32([[2014], [2015]]))
    np.testing.assert_array_equal(model(x), expected)
    np.testing.assert_array_equal(model.predict(x, verbose=0), expected)
    assert model.body.compute_dtype == mode.removeprefix("mixed_")
    model.save(tmp_path / "years.keras")
    path = str(tmp_path / "years.keras")
    (found,) = workers.run(predicted_without, [path], workers=1)
    np.testing.assert_array_equal(found, expected)


def predicted_without(path):
    loaded = keras.models.load_model(path, {"Years": Years})
    return loaded.predict(np.float32([[2014], [2015]]), verbose=0).tolist()


@in_both
def test_autograph_leaves_the_plan_of_a_model_alone(mode, caplog):
    """It would rewrite it from the source on disk, which may be another one by now."""
    frames = []

    class Looks(Years):
        def call(self, x):
            frames.extend(each.name for each in traceback.extract_stack())
            return super().call(x)

    tfamp.enable(mode)
    model = Looks()
    with caplog.at_level("WARNING"):
        tf.function(model)(tf.constant([[2014.0], [2015.0]]))
    assert "give_called" in frames and "tf__give_called" not in frames
    assert "AutoGraph" not in caplog.text
    assert model.scale.compute_dtype == "float32"


# ---- Monitors and overrides ----


@pytest.mark.parametrize("late", [False, True])
def test_a_monitor_leaves_the_overrides_of_a_model_that_fit_builds(late):
    mode = "mixed_bfloat16"
    pattern, expected = ("m/head", mode) if late else ("m/body", "float32")
    tfamp.enable(mode, overrides={pattern: expected})
    for callbacks in ([], [tfamp.NumericsMonitor(log_dir=None)]):
        model = Layers(name="m")
        helpers.fit(model, X, Y, batch_size=2, callbacks=callbacks)
        assert policies(model)[pattern] == expected
    low = {path for path, policy in policies(model).items() if policy == mode}
    assert {row.path for row in callbacks[0].rows} == low - {"m"}


class GAN(keras.Model):
    """Has no `call`, and a training step of its own."""

    def __init__(self):
        super().__init__()
        noise = [keras.Input((4,)), L.Dense(8, "relu"), L.Dense(3)]
        self.maker = keras.Sequential(noise)
        self.critic = keras.Sequential([keras.Input((3,)), L.Dense(8), L.Dense(1)])

    def train_step(self, x):
        with tf.GradientTape() as tape:
            made = self.maker(tf.ones([8, 4]))
            loss = tf.reduce_mean(self.critic(made) ** 2 + self.critic(x) ** 2)
        weights = self.maker.trainable_variables + self.critic.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"objective": loss}


class Pairs(Layers):
    """Its `call` takes something else than its batch."""

    def call(self, x, other):
        return super().call(x + other)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, other=x) - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"objective": loss}


@pytest.mark.parametrize("kind", [GAN, Pairs])
@pytest.mark.parametrize("eager", [False, True])
def test_a_monitor_never_ends_a_training(kind, eager, caplog):
    def run(callbacks):
        keras.utils.set_random_seed(0)
        model = kind()
        model.compile("sgd", run_eagerly=eager)
        given = (X,) if kind is GAN else (X, Y)
        fitted = model.fit(*given, epochs=3, verbose=0, callbacks=callbacks)
        assert "train_step" not in vars(model)
        return fitted.history["objective"]

    tfamp.enable("mixed_bfloat16")
    with caplog.at_level("WARNING"):
        watched = run([tfamp.NumericsMonitor(every=1, log_dir=None)])
    assert "training continues without it" in caplog.text
    np.testing.assert_allclose(watched, run([]), rtol=1e-6)


def normalized_on_replicas(_):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    tfamp.enable("mixed_bfloat16", on_unsupported="warn")
    monitor, losses = tfamp.NumericsMonitor(every=1, log_dir=None), []
    for callbacks in ([], [monitor]):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            norm = L.BatchNormalization(synchronized=True, name="norm")
            stack = [keras.Input((3,)), L.Dense(4, name="body"), norm, L.Dense(1)]
            model = keras.Sequential(stack, name="m")
            model.compile("sgd", "mse", jit_compile=False)
        x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
        fitted = model.fit(x, x[:, :1], 8, 2, verbose=0, callbacks=callbacks)
        losses.append(fitted.history["loss"])
        assert norm.synchronized
    return losses, [(row.path, row.outputs.values) for row in monitor.rows]


def test_a_monitor_beside_synchronized_normalization_on_replicas():
    (found,) = workers.run(normalized_on_replicas, [None], workers=1, cpus=2)
    losses, rows = found
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert [tuple(row) for row in rows] == [("m/body", 8 * 4), ("m/norm", 8 * 4)]


# ---- Threads ----


def test_threads_that_call_a_model_first_keep_what_the_others_set():
    for _ in range(3):
        tfamp.enable("mixed_bfloat16")
        x = y = keras.Input((3,))
        for _ in range(5):
            y = L.Dense(8)(y)
        model = keras.Model(x, L.Dense(1)(y))
        model.compile("sgd", "mse")
        tfamp.enable("mixed_bfloat16", fused_kernels=False)  # It has no plan of this.
        start = threading.Barrier(4)

        def run(index, model=model, start=start):
            start.wait()
            if index % 2:
                return model.predict(X, verbose=0)
            return model(X).numpy()

        with futures.ThreadPoolExecutor(4) as pool:
            found = list(pool.map(run, range(4)))
        tfamp.disable()
        for each in found:
            assert each.dtype == "float32"
            np.testing.assert_allclose(each, found[0], rtol=1e-2)
        assert {each.compute_dtype for each in model.layers[1:-1]} == {"bfloat16"}
        assert model.layers[-1].compute_dtype == "float32"
        assert "call" not in vars(model)


@in_both
def test_two_models_are_fitted_in_threads(mode):
    def fitted(model):
        return helpers.fit(model, X, Y, epochs=3)

    def run(each):
        keras.utils.set_random_seed(0)
        with helpers.enabled(mode):
            pair = [Layers(name=name) for name in "ab"]
            for model in pair:
                model(X)
            return list(each(fitted, pair))

    with futures.ThreadPoolExecutor(2) as pool:
        apart = run(pool.map)
    np.testing.assert_allclose(apart, run(map), rtol=1e-2)


def test_enable_from_two_threads_leaves_one_compile():
    before = helpers.read_globals()
    start = threading.Barrier(3)

    def switch(mode):
        start.wait()
        for _ in range(20):
            tfamp.enable(mode)
            tfamp.disable()

    with futures.ThreadPoolExecutor(3) as pool:
        errors = [*pool.map(switch, (*helpers.LOW, "float32"))]
    tfamp.disable()
    after = helpers.read_globals()
    keras.config.set_dtype_policy("float32")  # That of this thread.
    tf.config.experimental.enable_tensor_float_32_execution(before.tensor_float_32)
    assert errors == [None] * 3 and after.methods == before.methods


# ---- TF32 ----


@pytest.mark.parametrize("feature", ["comparison", "search", "export"])
def test_float32_is_computed_and_timed_without_tf32(feature, tmp_path):
    """It is a reference: on GPUs, TF32 has ten bits of float32's 23."""
    on = tf.config.experimental.tensor_float_32_execution_enabled
    seen = []

    def look(value):
        seen.append(on())
        return value

    class Look(L.Layer):
        def call(self, x):
            if self.compute_dtype != "float32":
                return x
            y = tf.numpy_function(look, [x], x.dtype)
            return tf.ensure_shape(y, x.shape) + x - tf.stop_gradient(x)

    stack = [keras.Input((3,)), L.Dense(4), Look(), L.Dense(4), L.Dense(1)]
    model = keras.Sequential(stack)
    run = {
        "comparison": lambda: tfamp.compare_precision(model, X, "mixed_bfloat16"),
        "search": lambda: tfamp.search_precision(model, [X] * 4, "mixed_bfloat16"),
        "export": lambda: tfamp.export(model, tmp_path / "low", "mixed_bfloat16"),
    }
    tf.config.experimental.enable_tensor_float_32_execution(True)
    try:
        if feature == "export":  # The model as it is runs first, to be compared.
            model(X)
        run[feature]()
        assert on()
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(False)
    before = 2 if feature == "export" else 0
    assert len(seen) > before and not any(seen[before:])


# ---- The rewrite, the comparison, the audit, files ----


def test_disabling_the_rewrite_forgets_no_pattern():
    def build(name):
        x = keras.Input((3,))
        return keras.Model(x, L.Dense(1, name=name)(x))

    tfamp.enable("mixed_bfloat16", overrides={"a_head": "float32"})
    build("a_head").compile("sgd", "mse")
    tfamp.disable_graph_rewrite()
    build("other").compile("sgd", "mse")


def attentive():
    ids = keras.Input((6,), dtype="int32")
    x = L.Embedding(9, 8, mask_zero=True)(ids)
    x = L.MultiHeadAttention(2, 4, name="mha")(x, x)
    return keras.Model(ids, L.Dense(2)(L.GlobalAveragePooling1D()(x)))


def test_masks_are_there_when_a_layer_is_compared_alone():
    ids = np.array([[1, 2, 3, 0, 0, 0], [4, 5, 0, 0, 0, 0]])
    found = tfamp.compare_precision(attentive(), ids, "mixed_bfloat16")
    (row,) = [row for row in found.rows if row.path == "mha"]
    assert row.accumulated_error < 0.02 and row.local_error < 0.02


def test_the_audit_and_the_comparison_agree_on_outputs():
    with tfamp.policy_scope("mixed_bfloat16"):
        model = Layers(name="m")
        model(X)
    before = models.described(model)
    compared = tfamp.compare_precision(model, X, "mixed_bfloat16")
    head = {row.path: row.format for row in compared.rows}["m/head"]
    tfamp.enable("mixed_bfloat16")
    report = tfamp.audit(model, inputs=X, device="cpu-amx")
    assert head == "float32" and report.formats["float32"] > 0
    assert "outputs" not in {each.rule for each in report.findings}
    assert models.described(model) == before  # It looks, and changes nothing.


def test_a_comparison_with_a_batch_asks_for_none(caplog):
    model, ids = TakesIds(), np.ones((4, 5), "int32")
    model(ids)
    with caplog.at_level("WARNING"):
        found = tfamp.compare_precision(model, ids, "mixed_bfloat16")
    assert "sample_inputs" not in caplog.text
    assert {row.format for row in found.rows if "dense" in row.path} == {"float32"}


def test_what_a_folder_lacks_is_said(monkeypatch, tmp_path):
    """Keras says of a folder what state is lost, and so it is said."""

    def loads(path, *args):
        import warnings

        warnings.warn("Skipping variable loading for optimizer 'adam'", stacklevel=1)
        return models.sequential()

    monkeypatch.setattr(keras.models, "load_model", loads)
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        tfamp.load_model(tmp_path)


# ---- A plan that fails changes nothing ----


@pytest.mark.filterwarnings("always:(?s).*The structure of `inputs`:UserWarning")
@in_both
def test_a_functional_model_that_is_called_by_another_structure_warns_once(mode):
    """Its first call is planned by its own inputs, and not by those."""
    tfamp.enable(mode)
    first, second = (keras.Input((2,), name=name) for name in "ab")
    sums = keras.layers.Add()([first, second])
    model = keras.Model({"a": first, "b": second}, sums)
    with pytest.warns(UserWarning, match="structure of `inputs`") as caught:
        model([np.ones((1, 2)), np.ones((1, 2))])
    assert len([x for x in caught if "structure" in str(x.message)]) == 1
