"""`fit`, `evaluate` and `predict` under XLA: compilations, messages, refusals."""

import os

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf
import workers

import tfamp

pytestmark = pytest.mark.usefixtures("disabled")

MODES = ("float32", "mixed_bfloat16", "mixed_float16")
ROWS, BATCH = 39, 16  # Batches of 16, 16 and 7 rows.
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 8)).astype("float32")
Y = RNG.integers(0, 3, ROWS)
WEIGHTS = RNG.uniform(0.5, 2, ROWS).astype("float32")


@keras.saving.register_keras_serializable("tests")
class Segments(keras.layers.Layer):
    """Adds 0, by an operator that XLA does not have on any device."""

    def call(self, x):
        sums = tf.math.segment_sum(x, tf.range(tf.shape(x)[0]))
        return x + 0 * tf.cast(sums, x.dtype)


def make(*layers, jit_compile: bool | str = True, optimizer=None, **keywords):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, "relu"),
            *layers,
            keras.layers.Dense(3, "softmax", dtype="float32"),
        ],
        name="made",
    )
    model.compile(
        optimizer or keras.optimizers.Adam(0.01),
        "sparse_categorical_crossentropy",
        weighted_metrics=["accuracy"],
        jit_compile=jit_compile,
        **keywords,
    )
    return model


def chosen(*layers, **keywords):
    """A model for which Keras chose XLA, as it does on a GPU."""
    model = make(*layers, jit_compile="auto", **keywords)
    model.jit_compile = True
    return model


@pytest.fixture
def model():
    tfamp.enable("float32")
    return make()


def lines(caplog):
    """What was said of XLA, each with its kind of step and shapes."""
    found = [record.getMessage() for record in caplog.records]
    return [line for line in found if line.startswith("XLA")]


# ---- Compilations ----

COUNTED = """
import os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
sys.path[:0] = sys.argv[2:]
import keras, numpy as np, tfamp
import test_xla_steps as steps
given = {"batch_size": steps.BATCH, "epochs": 2, "verbose": 0}
data = steps.X, steps.Y
for mode in steps.MODES:
    tfamp.enable(mode)
    before = len([*folder.glob("*one_step_on_data*before_optimizations*")])
    steps.make().fit(*data, validation_data=data, **given)
    after = len([*folder.glob("*one_step_on_data*before_optimizations*")])
    print(mode, after - before)
"""


@pytest.mark.training
def test_a_fit_with_rests_compiles_once_for_training_and_once_for_validation(tmp_path):
    folders = [os.path.dirname(file) for file in (__file__, helpers.__file__)]
    done = workers.run_python("-c", COUNTED, tmp_path, *folders)
    counts = dict(line.split() for line in done.stdout.splitlines())
    assert counts == dict.fromkeys(MODES, "2")  # Keras: 4, as tests/upstream counts.


@pytest.mark.issue("keras-cv#2406")
def test_each_compilation_is_told_with_its_shapes_and_seconds(model, caplog):
    data = {"validation_data": (X, Y), "batch_size": BATCH, "verbose": 0}
    model.fit(X, Y, epochs=2, **data)
    training, trained, evaluation, evaluated = lines(caplog)
    for line, kind in ((training, "training"), (evaluation, "evaluation")):
        expected = (
            f"the {kind} step of model 'made' for batches of shape (16, 8), (16,)"
        )
        assert expected in line
    assert trained.endswith(" s.") and evaluated.endswith(" s.")
    caplog.clear()
    model.fit(X, Y, **data)
    assert lines(caplog) == []


@pytest.mark.parametrize(
    ("sizes", "compiled"),
    [
        ((8, 8, 3, 8, 3), [8]),
        ((8, 3, 3, 8, 3), [8, 3]),  # Twice in a row: no rest.
        ((8, 7), [8, 7]),  # Without XLA it might need more memory.
        ((2, 8, 2), [2, 8]),
    ],
)
def test_a_batch_of_fewer_rows_is_compiled_when_it_comes_twice(
    sizes, compiled, model, caplog
):
    data = tf.data.Dataset.from_generator(
        lambda: ((X[:n], Y[:n]) for n in sizes),
        output_signature=(
            tf.TensorSpec([None, 8]),
            tf.TensorSpec([None], tf.int64),
        ),
    )
    data = data.apply(tf.data.experimental.assert_cardinality(len(sizes)))
    model.fit(data, verbose=0, shuffle=False)
    told = [line for line in lines(caplog) if " compiles " in line]
    assert [f"({n}, 8), ({n},)." in x for n, x in zip(compiled, told, strict=True)]
    assert len(told) == len(compiled)
    assert model.optimizer.iterations.numpy() == len(sizes)


def test_predictions_of_many_lengths_compile_the_first(model, caplog):
    expected = model(X)
    for count in (39, 5, 1, 4, 2):
        found = model.predict(X[:count], verbose=0)
        np.testing.assert_allclose(found, expected[:count], rtol=1e-5, atol=1e-6)
    assert len(lines(caplog)) == 2


def test_losses_of_several_outputs_are_means_over_rows():
    tfamp.enable("float32")
    inputs = keras.Input((8,))
    outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in "ab"}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {"a": "mse", "b": "mae"}, jit_compile=True)
    y = {name: X[:, :1] ** 3 for name in "ab"}
    expected = model.evaluate(X, y, batch_size=ROWS, verbose=0)
    model.compile("sgd", {"a": "mse", "b": "mae"}, jit_compile=True)
    found = model.evaluate(X, y, batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# ---- The same training as without XLA ----

NORMALIZED = keras.layers.BatchNormalization
FITS = {  # Layer, keywords of `compile`, of the optimizer, and of `fit`.
    "sample_weight": (NORMALIZED, {}, {}, {"sample_weight": WEIGHTS}),
    "class_weight": (
        keras.layers.LayerNormalization,
        {"steps_per_execution": 2},
        {"weight_decay": 0.1, "global_clipnorm": 0.1},
        {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}},
    ),
    "accumulation": (NORMALIZED, {}, {"gradient_accumulation_steps": 2}, {}),
}


@pytest.mark.parametrize("name", helpers.names_of(FITS, quick=["sample_weight"]))
def test_a_training_with_rests_is_that_of_keras_without_xla(name):
    layer, compiled, updates, weights = FITS[name]

    def fit(jit_compile):
        keywords = {"optimizer": keras.optimizers.Adam(0.01, **updates), **compiled}
        model = make(layer(), jit_compile=jit_compile, **keywords)
        given = {"batch_size": BATCH, "verbose": 0}
        history = model.fit(
            *(X, Y), epochs=3, shuffle=False, validation_data=(X, Y), **weights, **given
        )
        return model, history.history, model.predict(X, **given)

    stock, history, outputs = fit(False)
    tfamp.enable("float32")
    model, found, predicted = fit(True)
    assert model.jit_compile and found.keys() == history.keys()
    old = [*history.values(), *stock.variables, *stock.optimizer.variables, outputs]
    new = [*found.values(), *model.variables, *model.optimizer.variables, predicted]
    helpers.assert_equal(new, old, rtol=1e-4, atol=1e-5)


def test_dropout_takes_one_seed_a_step():
    tfamp.enable("mixed_bfloat16")
    layer = keras.layers.Dropout(0.5, seed=7)
    first = layer.seed_generator.state.numpy()
    losses = (
        make(layer).fit(X, Y, batch_size=BATCH, epochs=2, verbose=0).history["loss"]
    )
    assert np.isfinite(losses).all()
    assert layer.seed_generator.state.numpy()[1] == first[1] + 6


def test_train_on_batch_and_its_like_are_compiled_for_every_size(model, caplog):
    for rows in (16, 4):
        model.train_on_batch(X[:rows], Y[:rows])
        model.test_on_batch(X[:rows], Y[:rows])
    assert sum(" compiles " in line for line in lines(caplog)) == 4


@pytest.mark.skipif(keras.__version__ < "3.13", reason="Keras takes no None there")
def test_batches_may_be_dictionaries_and_lack_weights():
    tfamp.enable("float32")

    def batches():
        for start in (0, 16, 32):
            yield {"x": X[start : start + 16]}, Y[start : start + 16], None

    inputs = keras.Input((8,), name="x")
    model = keras.Model({"x": inputs}, keras.layers.Dense(3, "softmax")(inputs))
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=True)
    model.fit(batches(), verbose=0, shuffle=False, steps_per_epoch=3)
    assert model.optimizer.iterations.numpy() == 3


# ---- What XLA does not compile ----


@pytest.mark.issue("keras#18456")
def test_a_step_that_xla_refuses_runs_without_it_on_the_same_batch():
    def fit(model):
        drawn = []

        def batches():
            for start in (0, 16, 32):
                drawn.append(start)
                yield X[start : start + 16], Y[start : start + 16]

        spec = (tf.TensorSpec([None, 8]), tf.TensorSpec([None], tf.int64))
        data = tf.data.Dataset.from_generator(batches, output_signature=spec)
        data = data.apply(tf.data.experimental.assert_cardinality(3))
        layers = [Segments(), keras.layers.Dropout(0.5, seed=7)]
        model = model(*layers)
        given = {"validation_data": (X, Y), "verbose": 0, "shuffle": False}
        history = model.fit(data, epochs=2, **given).history
        return model, history, drawn

    stock, expected, drawn = fit(lambda *layers: make(*layers, jit_compile=False))
    tfamp.enable("float32")
    with pytest.warns(UserWarning, match=r"SegmentSum \(.*without it") as warned:
        model, history, found = fit(chosen)
    ours = [each for each in warned if each.category is UserWarning]
    assert [each.filename for each in ours] == [__file__]
    assert history == expected and found == drawn == [0, 16, 32] * 2
    assert not model.jit_compile
    helpers.assert_equal(model.variables, stock.variables)


@pytest.mark.issue(
    "HGQ2#14", "aws/deep-learning-containers#6417", "aws/deep-learning-containers#6418"
)
def test_a_convolution_that_cudnn_has_no_kernel_for_runs_without_xla():
    """XLA's message on a GPU, raised at the first trace, which is XLA's."""
    message = (
        "Autotuner could not find any supported configs for HLO: %cudnn-conv-bias-"
        'activation.6, custom_call_target="__cudnn$convBiasActivationForward", '
        'metadata={op_type="Conv2D" op_name="sequential_1/conv2d/convolution"}'
    )

    class Refused(keras.optimizers.SGD):
        traced = 0

        def update_step(self, *arguments):
            Refused.traced += 1
            if Refused.traced == 1:
                raise tf.errors.InternalError(None, None, message)
            super().update_step(*arguments)

    tfamp.enable("float32")
    model = chosen(optimizer=Refused())
    with pytest.warns(UserWarning, match=r"Conv2D .*without it"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert model.optimizer.iterations.numpy() == 3 and not model.jit_compile


@pytest.mark.parametrize("call", ["evaluate", "predict", "train_on_batch"])
def test_every_function_goes_on_without_xla(call):
    tfamp.enable("float32")
    model = chosen(Segments())
    expected = model(X)
    given = {"predict": [X], "evaluate": [X, Y]}.get(call, [X[:16], Y[:16]])
    keywords = {} if "batch" in call else {"verbose": 0, "batch_size": BATCH}
    with pytest.warns(UserWarning, match="SegmentSum"):
        found = getattr(model, call)(*given, **keywords)
    if call == "predict":
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert model.optimizer.iterations.numpy() == (call == "train_on_batch")


def test_a_refused_step_of_several_is_none_of_them():
    tfamp.enable("mixed_bfloat16")
    model = chosen(Segments(), steps_per_execution=2)
    with pytest.warns(UserWarning, match="SegmentSum"):
        model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0)
    assert model.optimizer.iterations.numpy() == 6


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: tf.fill([tf.cast(tf.reduce_max(x), tf.int32)], 1.0), "Fill"),
        (lambda x: tf.numpy_function(np.sum, [x], tf.float32), "PyFunc"),
        # XLA itself refuses it, and not TensorFlow.
        (lambda x: x[: tf.cast(tf.reduce_max(x), tf.int32)], "StridedSliceGrad"),
    ],
)
def test_who_asks_for_xla_gets_the_error_with_a_sentence(function, operator):
    class Asks(keras.layers.Layer):
        def call(self, x):
            return x + 0 * tf.reduce_sum(function(x))

    tfamp.enable("float32")
    dropout = keras.layers.Dropout(0.5, seed=7)
    model = make(dropout, Asks())
    before = [x.numpy() for x in (*model.variables, dropout.seed_generator.state)]
    with pytest.raises(tf.errors.OpError) as raised:
        model.fit(X, Y, batch_size=BATCH, verbose=0)
    (note,) = raised.value.__notes__
    assert f"XLA does not compile {operator} (" in note and "jit_compile=False" in note
    after = [x.numpy() for x in (*model.variables, dropout.seed_generator.state)]
    helpers.assert_equal(after, before)
    for each in (*model.optimizer.variables, *model.metrics_variables):
        if each is not model.optimizer.learning_rate:
            np.testing.assert_array_equal(each.numpy(), 0)


def test_errors_of_the_data_stay_as_they_are():
    tfamp.enable("float32")
    model = chosen()

    def fails(x, y):
        with tf.control_dependencies([tf.debugging.assert_less(y, Y[20])]):
            return x, tf.identity(y)

    rows = tf.data.Dataset.from_tensor_slices((X, np.arange(ROWS) // 20 + Y[20] - 1))
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        model.fit(rows.map(fails).batch(10), verbose=0, shuffle=False)
    assert model.jit_compile and not hasattr(raised.value, "__notes__")
    assert model.optimizer.iterations.numpy() == 2


def test_a_file_does_not_ask_for_xla(tmp_path):
    """It says True where Keras had chosen it, on a GPU."""
    tfamp.enable("float32")
    model = make(Segments())
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "made.keras")
    model = keras.saving.load_model(tmp_path / "made.keras")
    assert model.jit_compile
    with pytest.warns(UserWarning, match="SegmentSum"):
        model.fit(X, Y, verbose=0)


@pytest.mark.training
def test_disable_gives_keras_its_functions_back(model):
    model.fit(X, Y, verbose=0)
    made = type(model.train_function)
    tfamp.disable()
    other = make()
    other.fit(X, Y, verbose=0, validation_data=(X, Y))
    assert type(other.train_function) is type(other.test_function) is not made
