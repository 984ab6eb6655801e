"""Layers that are computed again in the backward pass: `set_remat`, `RematScope`.

What they train is compared with the same model that keeps everything; on a CPU
bit for bit.
"""

import contextlib
import gc
import weakref
import zipfile

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
import workers
from tensorflow.python.eager import context

import tfamp

L = keras.layers
MODES = ("float32", "mixed_bfloat16", "mixed_float16")
BLOCKS = ["block_."]


class Block(L.Layer):
    """Has what is updated in a call: seeds, statistics, a loss and a metric."""

    calls = 0

    def __init__(self, **keywords):
        super().__init__(**keywords)
        width = 16
        self.inner = [L.LayerNormalization(), L.Dense(2 * width, "gelu")]
        self.inner += [L.Dropout(0.2), L.Dense(width), L.BatchNormalization()]
        self.attend = L.MultiHeadAttention(2, width // 2, dropout=0.1)
        self.seen = keras.metrics.Sum(name="seen")

    def build(self, shape):
        self.attend.build(shape, shape)
        for layer in self.inner:
            layer.build(shape)
            shape = layer.compute_output_shape(shape)

    def call(self, x, scale=1.0, training=None):
        self.calls += 1
        y = x = x + self.attend(x, x)
        for layer in self.inner:
            y = layer(y, training=training) if layer.name[0] in "db" else layer(y)
        if training:
            self.add_loss(0.1 * tf.reduce_mean(tf.cast(y, "float32") ** 2))
            self.seen.update_state(tf.ones(3))
        return {"sum": x + scale * y, "rows": tf.shape(x)[0]}


def stack(**keywords):
    """Returns a compiled model of two blocks."""
    keras.utils.set_random_seed(1)
    x = inputs = keras.Input((4, 16))
    for number in range(2):
        x = Block(name=f"block_{number}")(x, scale=0.5)["sum"]
    model = keras.Model(inputs, L.Dense(1)(x))
    model.compile(keras.optimizers.SGD(0.01, 0.9), "mse", **keywords)
    return model


def batches(rows=40):
    x = np.random.default_rng(0).normal(size=(rows, 4, 16)).astype("float32")
    return x, x[..., :1] ** 2


def trained(mode, remat, make=stack, data=None, epochs=2, **keywords):
    """Returns a model after ten steps, and the history."""
    keras.backend.clear_session()  # Names decide in which order a graph sums.
    with helpers.enabled(mode, remat=remat):
        model = make(**keywords)
        x, y = data or batches()
        quiet = {"shuffle": False, "verbose": 0, "batch_size": 8}
        history = model.fit(x, y, epochs=epochs, **quiet).history
        return model, history


def assert_same(pair, tolerance=0.0):
    """Asserts that two (model, history) have the same variables and losses."""
    (one, losses), (other, again) = pair
    helpers.assert_equal(one.variables, other.variables, rtol=0, atol=tolerance)
    assert len(set(losses["loss"])) > 1
    np.testing.assert_allclose(losses["loss"], again["loss"], rtol=tolerance)


@pytest.mark.device
@pytest.mark.issue("keras#21448", "keras#20964", "tf-keras#98", "tensorflow#36981")
@pytest.mark.parametrize(
    "mode", helpers.names_of(MODES, quick=["mixed_bfloat16"], slow=["float32"])
)
def test_ten_steps_of_fit_are_those_without_it(mode):
    pair = [trained(mode, remat) for remat in (None, BLOCKS)]
    assert_same(pair, helpers.roundings(mode, 128 if mode == "float32" else 4))
    plain, again = (model.get_layer("block_1") for model, _ in pair)
    assert again.calls > plain.calls  # The backward pass calls it, too.
    assert float(again.seen.result()) == 3 * 5  # Of the last epoch.


@pytest.mark.training
def test_under_xla_it_trains_the_same_up_to_its_roundings():
    pair = [trained("float32", x, jit_compile=True) for x in (None, BLOCKS)]
    assert pair[0][0].jit_compile
    assert_same(pair, 1e-5)


def by_hand(model, wrap, x, y):
    """Returns losses and gradients of two steps of a loop, with a penalty."""
    found = []

    def step(x, y):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
                loss += sum(model.losses)
            slope = tape.gradient(loss, x)
            total = loss + tf.reduce_sum(slope**2)
        return total, outer.gradient(total, model.trainable_variables)

    for _ in range(2):
        total, gradients = wrap(step)(x, y)
        found += [total, *gradients]
        model.optimizer.apply(gradients, model.trainable_variables)
    return found


@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize(
    "mode", helpers.names_of(["float32", "mixed_bfloat16"], slow=["float32"])
)
def test_loops_and_second_derivatives_are_those_without_it(mode, how):
    x, y = map(tf.constant, batches(8))
    found = []
    for remat in (None, BLOCKS):
        keras.backend.clear_session()
        with helpers.enabled(mode, remat=remat):
            found.append(by_hand(stack(), helpers.RUNNERS[how], x, y))
    # A second derivative sums in another order.
    low = {"float32": 1e-5, "mixed_bfloat16": 0.05}[mode]
    helpers.assert_equal(*found, rtol=low, atol=low)
    assert all(x is not None for x in found[1])


def replicas(mode, tolerance):
    """Trains on two replicas; returns how often a block was computed again."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def make():
        with strategy.scope():
            return stack()

    pair = [trained(mode, remat, make) for remat in (None, BLOCKS)]
    assert_same(pair, tolerance)
    return pair[1][0].get_layer("block_0").calls - pair[0][0].get_layer("block_0").calls


# No fused kernels there: Grappler merges factors that a block need not keep.
@pytest.mark.parametrize(
    ("mode", "tolerance"),
    [
        *helpers.whole_runs([("float32", 0.0)]),
        *helpers.whole_runs([("mixed_float16", 4 * 2**-10)], pytest.mark.slow),
    ],
)
def test_replicas_train_as_without_it(mode, tolerance):
    assert workers.run(replicas, (mode, tolerance), workers=1, cpus=2)[0] > 0


# ---- keras.RematScope ----

SCOPES = {
    "full": {},
    "activations": {},
    "larger_than": {"output_size_threshold": 40},
    "list_of_layers": {"layer_names": ["wide"]},
    None: {},
}


def scoped(scope=None):
    keras.utils.set_random_seed(2)
    inputs = keras.Input((8,))
    with scope or contextlib.nullcontext():
        x = L.Dense(64, "relu", name="wide")(inputs)
        x = L.BatchNormalization()(L.Dropout(0.3)(x))
        with keras.RematScope("full") if scope else contextlib.nullcontext():
            x = L.Dense(8, "tanh", name="inner")(x)
        outputs = L.Dense(1)(x + inputs)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    return model


@pytest.mark.issue("keras#21448", "keras#23387")
@pytest.mark.parametrize("kind", SCOPES)
def test_every_mode_of_remat_scope_trains_in_fit(kind):
    x = np.random.default_rng(0).normal(size=(40, 8)).astype("float32")
    scope = keras.RematScope(kind, **SCOPES[kind])
    pair = [
        trained("mixed_bfloat16", None, scoped, (x, x[:, :1]), scope=each)
        for each in (None, scope)
    ]
    assert_same(pair)
    reasons = {row.path: row.reason for row in tfamp.describe_layers(pair[1][0])}
    assert (f"RematScope({kind!r})" in reasons["wide"]) == (kind is not None)
    assert "RematScope('full')" in reasons["inner"]


def test_an_update_waits_for_what_a_block_has_read():
    # TensorFlow's own edge for it is lost when the graph is optimized.
    x = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
    with helpers.enabled("mixed_bfloat16", remat=[".*dense.*"]):
        model = keras.Sequential([keras.Input((16,)), *(L.Dense(16) for _ in range(3))])
        model.compile("sgd", "mse")
        step = tf.function(lambda *batch: model.train_step(batch))
        context.enable_run_metadata()  # It keeps the graphs of a first call.
        try:
            step(x, x)
            ran = context.export_run_metadata().function_graphs[-1]
        finally:
            context.disable_run_metadata()
    nodes = {node.name: node for node in ran.post_optimization_graph.node}

    def before(name, found):
        if name not in found:
            found.add(name)
            for source in nodes[name].input:
                before(source.lstrip("^").split(":")[0], found)
        return found

    used = {source for node in nodes.values() for source in node.input}
    reads = [nodes[x] for x in used & {*nodes} if nodes[x].op == "ReadVariableOp"]
    updates = [node for node in nodes.values() if node.op == "AssignSubVariableOp"]
    assert len(updates) == 6
    for update in updates:
        of_it = {node.name for node in reads if node.input[0] == update.input[0]}
        assert of_it and of_it <= before(update.name, set())


@pytest.mark.issue("keras#21207")
def test_keras_remat_of_a_function_takes_keywords_in_a_graph():
    with helpers.enabled("float32"):
        again = keras.remat(lambda x, factor: {"y": tf.exp(x) * factor})
        run = helpers.value_and_gradient(lambda x: again(x, factor=3.0)["y"])
        _, slope = tf.function(run)(tf.ones(2))
        np.testing.assert_allclose(slope, 3 * np.exp([1.0, 1.0]), 1e-6)


class Doubled(keras.Operation):
    def call(self, x):
        return x * 2

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


@pytest.mark.issue("keras#23106")
def test_operations_that_are_no_layers_run_in_a_scope():
    x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
    with helpers.enabled("mixed_bfloat16"), keras.RematScope("full"):
        inputs = keras.Input((8,))
        model = keras.Model(inputs, Doubled()(L.Dense(1)(inputs)))
        np.testing.assert_array_equal(Doubled()(x), 2 * x)
        losses = helpers.fit(model, x, x[:, :1], epochs=3)
    assert losses == sorted(losses, reverse=True)


# ---- Whole models, in both mixed modes ----


IDS = np.random.default_rng(0).integers(1, 20, size=(16, 6))
TOKENS = {"token_ids": IDS, "padding_mask": 0 * IDS + 1}
# fmt: off
SIZES = {
    "vocabulary_size": 20, "num_layers": 2, "num_heads": 2, "hidden_dim": 8,
    "intermediate_dim": 16, "max_sequence_length": 6, "dropout": 0.1,
}
# fmt: on


def bert():
    hub = pytest.importorskip("keras_hub")
    backbone = hub.models.BertBackbone(**SIZES)
    outputs = L.Dense(1)(backbone.output["pooled_output"])
    x = {**TOKENS, "segment_ids": 0 * IDS}
    return keras.Model(backbone.input, outputs), x, IDS[:, :1] / 20, "mse"


def gpt2():
    hub = pytest.importorskip("keras_hub")
    model = hub.models.GPT2CausalLM(hub.models.GPT2Backbone(**SIZES), None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, TOKENS, IDS, loss


def unet():
    def convolved(x, filters):
        for _ in range(2):
            x = L.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = L.ReLU()(L.BatchNormalization()(x))
        return x

    def level(shape, filters, name):
        x = keras.Input(shape)
        return keras.Model(x, convolved(x, filters), name=name)

    inputs = keras.Input((8, 8, 1))
    high = level((8, 8, 1), 4, "down")(inputs)
    low = level((4, 4, 4), 8, "bottom")(L.MaxPooling2D()(high))
    joined = L.Concatenate()([high, L.UpSampling2D()(low)])
    outputs = L.Conv2D(1, 1)(level((8, 8, 12), 4, "up")(joined))
    images = np.random.default_rng(0).normal(size=(16, 8, 8, 1)).astype("float32")
    return keras.Model(inputs, outputs), images, images**2, "mse"


WHOLE = {
    bert: [r"(.*/)?transformer_layer_\d"],
    gpt2: [r"(.*/)?transformer_layer_\d"],
    unet: ["down|bottom|up"],
}


@pytest.mark.issue("keras#21448")
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("make", helpers.names_of(WHOLE, quick=[unet], slow=[gpt2]))
def test_whole_models_train_as_without_it(make, mode):
    losses = []
    for remat in (None, WHOLE[make]):
        keras.backend.clear_session()
        keras.utils.set_random_seed(5)
        with helpers.enabled(mode, remat=remat):
            model, x, y, loss = make()
            given = {"shuffle": False, "epochs": 2, "batch_size": 8}
            sgd = keras.optimizers.SGD(0.1)
            losses.append(helpers.fit(model, x, y, sgd, loss, **given))
            again = [
                x for x in tfamp.describe_layers(model) if "recomputed" in x.reason
            ]
            assert len(again) == (0 if remat is None else 2 + (make is unet))
    np.testing.assert_array_equal(*losses)


# ---- What is held, and of when ----


class Holds(L.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        middle = x * self.scale
        self.middle = weakref.ref(middle)
        return middle * middle


@pytest.mark.issue("tensorflow#57205")
@pytest.mark.parametrize("remat", [False, True])
def test_what_a_block_computes_is_held_only_without_it(remat):
    model = keras.Sequential([keras.Input((2,)), Holds(name="holds")])
    tfamp.set_remat(model, [".*holds"] if remat else None)
    with tf.GradientTape() as tape:
        y = model(tf.ones((1, 2)), training=True)
    gc.collect()
    assert (model.layers[0].middle() is None) == remat
    model.layers[0].scale.assign(7.0)  # Gradients are those of the forward pass.
    assert float(tape.gradient(y, model.trainable_variables)[0]) == 4.0


def spectral():
    keras.utils.set_random_seed(3)
    dense = L.SpectralNormalization(L.Dense(8), name="block_0")
    model = keras.Sequential([keras.Input((8,)), dense, L.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_weights_that_a_call_assigns_have_the_gradients_that_they_had():
    x = np.random.default_rng(0).normal(size=(40, 8)).astype("float32")
    made = [
        trained("float32", each, spectral, (x, x[:, :1]))
        for each in (None, [".*block_0"])
    ]
    assert_same(made)


class Table(L.Layer):
    """Embeds, and masks."""

    def __init__(self, **keywords):
        super().__init__(**keywords)
        self.table, self.cell = L.Embedding(9, 4, mask_zero=True), L.GRU(4)

    def build(self, shape):
        self.table.build(shape)
        self.cell.build((*shape, 4))

    def call(self, ids):
        return self.cell(self.table(ids))


def embedding(jit_compile=False):
    keras.utils.set_random_seed(4)
    inner = keras.Sequential([Table(name="table"), L.Dense(4, "relu")], name="block_0")
    ids = keras.Input((5,), dtype="int32")
    model = keras.Model(ids, L.Dense(1)(inner(ids)))
    model.compile("adam", "mse", jit_compile=jit_compile)
    return model


@pytest.mark.parametrize("xla", helpers.names_of([False, True], quick=[False]))
def test_a_block_in_a_block_trains_embeddings_and_masks(xla):
    ids = np.random.default_rng(0).integers(9, size=(40, 5))
    data = ids, ids.sum(1, keepdims=True).astype("float32")
    nested = ["block_0", ".*table"]
    pair = [
        trained("float32", each, embedding, data, jit_compile=xla)
        for each in (None, nested)
    ]
    assert_same(pair, 1e-5 if xla else 0.0)
    rows = tfamp.describe_layers(pair[1][0])
    found = [row.path for row in rows if "recomputed" in row.reason]
    assert found == ["block_0", "block_0/table"]


# ---- Assigned, shown, and taken back ----


def test_it_is_a_property_of_the_built_layer_and_of_no_file(tmp_path):
    model = stack()
    x, y = batches(8)
    model.train_on_batch(x, y)
    assert tfamp.set_remat(model, [".*"]) is model
    rows = {row.path: row.reason for row in tfamp.describe_layers(model)}
    again = {path for path, reason in rows.items() if "requested by '.*'" in reason}
    assert {"block_0", "block_1"} < again and "block_0/attend" not in again
    assert not any("block_0/" in path for path in again)  # The outermost alone.
    assert "Recomputed in the backward pass" in str(tfamp.audit(model, inputs=x))
    block = model.get_layer("block_0")
    for expected, patterns in ((2, ["block_0"]), (1, None)):
        tfamp.set_remat(model, patterns)
        before = block.calls
        model.train_on_batch(x, y)
        assert block.calls - before == expected
    tfamp.set_remat(model, ["block_0"])
    before = block.calls
    model.predict(x, verbose=0)
    assert block.calls == before + 1
    model.save(path := tmp_path / "model.keras")
    with zipfile.ZipFile(path) as file:
        assert b"remat_mode" not in file.read("config.json")
    loaded = keras.models.load_model(path, {"Block": Block})
    assert "again" not in str(tfamp.describe_layers(loaded))
    tfamp.export(model, tmp_path / "served")
    saved = (tmp_path / "served" / "saved_model.pb").read_bytes()
    assert b"CustomGradient" not in saved


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        ("block_.", "must be a list"),
        (3, "must be a list"),
        (["block_(", ""], "2|not a regular expression.*non-empty"),
        (["block_9"], "matched no layer.*block_0"),
        (["functional.*"], "matched no layer"),
    ],
)
def test_patterns_that_mean_no_layer_are_errors(patterns, says):
    model = stack()
    with pytest.raises(tfamp.OverrideError, match=says):
        tfamp.set_remat(model, patterns)
    with (
        pytest.raises(tfamp.OverrideError, match=says),
        helpers.enabled("float32", remat=patterns),
    ):
        stack()


def test_enable_says_it_and_the_next_one_takes_it_back():
    with helpers.enabled("float32", remat=BLOCKS) as status:
        assert "'block_.'" in status.remat and "works" in status.remat
        model = stack()
        assert "block_." in tfamp.describe_layers(model)[1].reason
        tfamp.enable("float32")
        model.compile("sgd", "mse")
        assert "block_." not in tfamp.describe_layers(model)[1].reason
    assert "as in Keras" in tfamp.status().remat


class OwnVariable(L.Layer):
    def build(self, shape):
        self.own = tf.Variable(2.0, name="own")

    def call(self, x):
        return x * self.own


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_a_variable_of_tensorflows_own_has_its_gradient(how):
    model = keras.Sequential([keras.Input((2,)), OwnVariable(name="block")])
    tfamp.set_remat(model, [".*block"])

    def slope(x):
        with tf.GradientTape() as tape:
            y = model(x, training=True)
        return tape.gradient(y, model.layers[0].own)

    assert float(helpers.RUNNERS[how](slope)(tf.ones((1, 2)))) == 2.0
