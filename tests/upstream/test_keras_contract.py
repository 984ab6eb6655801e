"""Private or patched names of Keras that tfamp touches; fails when Keras moves them."""

import inspect
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.facts import names
from tfamp.inspect import structure
from tfamp.keras_patches import compiling, hooks, keras_optimizers, patches
from tfamp.kernels import bias_gradient, install, long_attention, programs
from tfamp.precision import rules


def tiny_model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


@pytest.fixture
def hooked():
    """Installs a transform that notes its calls; removes it afterwards."""
    calls = []

    def transform(model, optimizer):
        calls.append((model, optimizer))
        return keras.optimizers.SGD(0.5)

    hook = compiling.hook_compile(transform, nothing)
    yield calls
    hook.remove()


def nothing(model, arguments):
    pass


def test_compile_is_defined_once_for_all_models():
    trainer = patches.trainer_class()
    assert "auto_scale_loss" in inspect.signature(trainer.compile).parameters
    for kind in (keras.Model, keras.Sequential):
        assert kind.compile is trainer.compile


@pytest.mark.parametrize(
    ("given", "named", "transformed", "made"),
    [
        (("adam", "mse"), {}, ["Adam"], "SGD"),
        ((), {"optimizer": "adam", "loss": "mse"}, ["Adam"], "SGD"),
        ((), {"loss": "mse"}, ["RMSprop"], "SGD"),
        ((None, "mse"), {}, [], None),
        (("adam", "mse"), {"auto_scale_loss": False}, [], "Adam"),
    ],
)
def test_hook_transforms_the_optimizer_that_keras_would_scale(
    hooked, given, named, transformed, made
):
    """By position, keyword and default; Keras adds no scaling of its own behind it."""
    model = tiny_model()
    model.dtype_policy = keras.dtype_policies.get("mixed_float16")
    model.compile(*given, **named)
    assert [type(o).__name__ for m, o in hooked if m is model] == transformed
    assert (model.optimizer and type(model.optimizer).__name__) == made
    saved = model.get_compile_config()["optimizer"]
    assert (saved and saved["class_name"]) == made


def test_compile_that_hides_its_arguments_is_refused(monkeypatch):
    own = patches.trainer_class().compile
    hiding = lambda *args, **kwargs: own(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(patches.trainer_class(), "compile", hiding)
    with pytest.raises(RuntimeError, match="functools.wraps"):
        compiling.hook_compile(lambda model, given: given, nothing)
    assert patches.trainer_class().compile is hiding


def test_layers_and_the_functional_twin_of_a_sequential_model_are_found():
    wrapped = keras.layers.TimeDistributed(keras.layers.Dense(2, name="wrapped"))
    inner = keras.Sequential([keras.Input((3, 4)), wrapped])
    outer = keras.Sequential([keras.Input((3, 4)), inner], name="outer")
    found = {place.path: place.layer for place in structure.walk(outer)}
    head = f"outer/{inner.name}"
    assert found[f"{head}/{wrapped.name}/wrapped"] is wrapped.layer
    assert outer._functional not in found.values()
    assert not structure.is_functional(outer)
    assert structure.is_functional(outer._functional)


def test_traced_functions_have_these_names_and_can_be_cloned():
    model = tiny_model()
    model.compile("sgd", "mse")
    x = np.zeros((2, 2))
    model.fit(x, np.zeros((2, 1)), verbose=0)
    model.evaluate(x, np.zeros((2, 1)), verbose=0)
    model.predict(x, verbose=0)
    names = ("train_function", "test_function", "predict_function")
    assert all(vars(model)[name] is not None for name in names)
    traced = tf.function(lambda x: x + 1)
    assert traced._clone(None) is not traced and traced._clone(None)(1) == 2
    # What it was compiled with is held as objects.
    assert model._compile_config.config["optimizer"] is model.optimizer


def test_names_of_optimizers_that_are_read_or_replaced_exist():
    # keras_patches/replicas.py does what `_backend_apply_gradients` does.
    optimizer = keras.optimizers.SGD(use_ema=True, gradient_accumulation_steps=2)
    assert callable(optimizer._backend_reset_gradient_accumulators)
    assert optimizer._iterations.dtype == "int64"
    assert isinstance(optimizer._learning_rate, keras.Variable)
    assert type(optimizer).__module__.startswith("keras.")
    assert optimizer._distribution_strategy is tf.distribute.get_strategy()
    weight = keras.Variable([1.0])
    optimizer.build([weight])
    (accumulator,) = optimizer._accumulated_gradients
    assert "gradient_accumulator" in accumulator.value.name
    assert optimizer._get_variable_index(weight) == 0
    assert optimizer._trainable_variables == [weight]
    parameters = {
        "_backend_apply_gradients": ["grads", "trainable_variables"],
        "_clip_gradients": ["grads"],
        "_all_reduce_sum_gradients": ["grads_and_vars"],
        "_apply_weight_decay": ["variables"],
        "_backend_update_step": ["grads", "trainable_variables", "learning_rate"],
        "_update_model_variables_moving_average": ["trainable_variables"],
    }
    for name, expected in parameters.items():
        assert [*inspect.signature(getattr(optimizer, name)).parameters] == expected


def test_seed_generator_state_is_a_variable_named_and_shaped_as_expected():
    # runs/callbacks/each_epoch.py finds dropout's state by this name.
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5)])
    states = [v for v in model.variables if v.name == "seed_generator_state"]
    assert [s.shape for s in states] == [(2,)]
    before = states[0].numpy()
    model(np.ones((1, 2)), training=True)
    np.testing.assert_array_equal(states[0].numpy() - before, [0, 1])


def test_fit_builds_from_a_batch_in_a_method_of_its_own():
    # training/distribution.py calls it with a batch and then takes its place.
    own = keras.Model._maybe_symbolic_build
    assert list(inspect.signature(own).parameters) == ["self", "iterator", "data_batch"]
    calls = []
    model = tiny_model()
    model.compile("sgd", "mse")
    model._maybe_symbolic_build = lambda iterator=None, data_batch=None: calls.append(1)
    model.fit(np.zeros((2, 2)), np.zeros((2, 1)), verbose=0)
    model.evaluate(np.zeros((2, 2)), np.zeros((2, 1)), verbose=0)
    assert len(calls) == 2


def test_replicas_keep_moving_statistics_apart():
    # "none": each its own. Otherwise callbacks/each_epoch.py need not average them.
    layer = keras.layers.BatchNormalization()
    layer.build((None, 2))
    assert [w.aggregation for w in layer.non_trainable_weights] == ["none", "none"]


def test_gradient_reduction_is_off_only_inside_and_only_here():
    members = [keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1)]
    several = keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(members[0], {"other": members[1]})
    )
    pairs = [(1.0, "a")]
    with keras_optimizers.without_gradient_reduction(several):
        assert [m._all_reduce_sum_gradients(pairs) for m in members] == [pairs] * 2
        assert "_all_reduce_sum_gradients" not in vars(keras.optimizers.SGD(0.1))
    assert all("_all_reduce_sum_gradients" not in vars(m) for m in members)


def test_optimizers_are_found_in_dir_and_saved_in_groups_of_their_own():
    # LossScaleOptimizer.__dir__ leaves the inner one out for that reason.
    walk = keras.src.saving.saving_lib._walk_saveable
    made = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    assert "inner_optimizer" in [name for name, _ in walk(made)]
    ours = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    assert "inner_optimizer" not in [name for name, _ in walk(ours)]


def test_optimizers_list_all_the_variables_that_they_write():
    # `masked_assignments` masks those; Nadam makes one outside of the list.
    nadam = keras.optimizers.Nadam(0.1)
    nadam.build([keras.Variable([1.0])])
    assert any(nadam._u_product is v for v in nadam.variables)


PATCHED = {
    "gelu": ["x", "approximate"],
    "silu": ["x"],
    "dropout": ["inputs", "rate", "noise_shape", "seed"],
    "layer_normalization": ["x", "gamma", "beta", "axis", "epsilon", "kwargs"],
    "lookup": ["self", "name"],
    "apply": ["self", "grads", "trainable_variables"],
    "_all_reduce_sum_gradients": ["self", "grads_and_vars"],
    "dot_product_attention": [
        *["query", "key", "value", "bias", "mask", "scale", "is_causal"],
        *["flash_attention", "attn_logits_soft_cap"],
    ],
}
GROUPS = (
    *(install.HOOKS, bias_gradient.HOOKS, bias_gradient.EMBEDDING_HOOKS),
    long_attention.HOOKS,
)
OF_KERNELS = [x for group in GROUPS for x in group.patches if x.find()]
# Keras -> what it has no place for; docs/maintainers/versions.md.
LACKED = {"3.10": {"layer normalization"}}.get(keras.__version__[:4], set())


def test_functions_that_kernels_replace_have_these_parameters():
    found = {
        patch.name: list(inspect.signature(vars(patch.find())[patch.name]).parameters)
        for patch in OF_KERNELS
    }
    assert patches.missing().keys() == LACKED
    lacked = {name for name, patch in patches.BY_NAME.items() if patch.what in LACKED}
    assert found == {name: PATCHED[name] for name in PATCHED.keys() - lacked}


def test_layers_and_optimizers_call_the_functions_that_are_replaced(monkeypatch):
    """Through the modules, and not by names that they imported."""
    called = []

    def noting(name, original):
        def function(*args, **kwargs):
            called.append(name)
            return original(*args, **kwargs)

        return function

    for patch in OF_KERNELS:
        owner, name = patch.find(), patch.name
        monkeypatch.setattr(owner, name, noting(name, vars(owner)[name]))
    layers = [
        keras.layers.Rescaling(0.5),
        keras.layers.Dense(4, "gelu"),
        keras.layers.Dense(4, "silu"),
        keras.layers.LayerNormalization(),
        keras.layers.Dropout(0.5),
    ]
    model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.AdamW(global_clipnorm=1.0), "mse")
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    model.predict(np.ones((2, 2)), verbose=0)
    keras.layers.Embedding(2, 2)(np.ones((2, 2)))
    keras.layers.MultiHeadAttention(1, 2)(*[np.ones((1, 2, 2))] * 2)
    assert set(called) == {patch.name for patch in OF_KERNELS}
    assert keras.optimizers.SGD.apply is keras.Optimizer.apply  # As AdamW's, above.


def test_keras_has_no_flash_attention():
    given = [tf.ones([1, 2, 1, 2])] * 3
    with pytest.raises(ValueError, match="not supported in tensorflow"):
        keras.ops.dot_product_attention(*given, flash_attention=True)


@pytest.mark.parametrize("kind", long_attention.LAYER_HOOKS.patches)
def test_attention_layers_with_dropout_have_one_function(kind):
    """Of these parameters, in this order; the names of a layer that are read exist."""
    method = vars(kind.find())["_compute_attention"]
    found = [*inspect.signature(method).parameters][1:]
    expected = [*inspect.signature(long_attention._compute_attention).parameters][1:]
    assert found[:5] == expected[:5] and {*found} <= {*expected}
    layer = kind.find()(2, 2, **({"num_key_value_heads": 1} if kind.alias else {}))
    layer.build((1, 2, 2), (1, 2, 2))
    assert layer._dropout_layer.rate == 0
    assert hasattr(layer, "_return_attention_scores") == bool(kind.alias)


def test_every_layer_is_called_through_one_function_and_preprocessing_before_it():
    """Keras' preprocessing layers convert what they take before `Layer.__call__`."""
    found = {key: patches.BY_NAME[key].find() for key in ("__call__", "data_layer")}
    parameters = [[*inspect.signature(x.__call__).parameters] for x in found.values()]
    assert parameters == [["self", "args", "kwargs"], ["self", "inputs", "kwargs"]]
    assert found["__call__"] is keras.Layer and found["data_layer"] is not keras.Layer
    for kind in (keras.Model, keras.Sequential, keras.layers.Embedding):
        assert kind.__call__ is keras.Layer.__call__


def test_layers_of_raw_values_are_known_by_their_folder():
    kinds = (
        "Rescaling Normalization Discretization CategoryEncoding RandomFlip Resizing"
    )
    layers = keras.layers
    assert all(
        rules._takes_raw_values(getattr(layers, x)(*[2] * n))
        for x, n in zip(kinds.split(), (1, 0, 1, 1, 0, 2), strict=True)
    )
    assert not rules._takes_raw_values(layers.Dense(1))
    assert not rules._takes_raw_values(layers.Embedding(1, 1))


def test_a_place_that_a_release_lacks_is_left_out_and_told_of(monkeypatch):
    """Everything else goes in, and `enable` works."""
    monkeypatch.delattr(keras.src.ops, "layer_normalization", raising=False)
    monkeypatch.delattr(keras.src.random.seed_generator, "draw_seed")
    status = tfamp.enable("mixed_bfloat16")
    tfamp.disable()
    assert status.fused_kernels.startswith("GELU, SiLU, kernel gradients")
    assert "dropout (keras.src.random.seed_generator:draw_seed)" in status.versions
    assert "layer normalization (keras.src.ops:layer_norm" in status.versions


class Look(keras.layers.Layer):
    """Notes what a function returns when the layer is called."""

    def __init__(self, function):
        super().__init__()
        self.function, self.seen = function, []

    def call(self, x):
        self.seen.append(self.function())
        return x


def test_call_context_tells_whether_layers_train():
    look = Look(install.trains)
    for training in (True, False, None):
        look(np.ones(1), training=training)
    assert look.seen == [True, False, False]
    assert not install.trains()


@pytest.mark.parametrize("steps", [1, 2])
def test_steps_of_evaluate_and_predict_are_traced_under_these_names(steps):
    """And an export is not: layers cannot tell otherwise."""
    look = Look(install._in_step_of_a_model)
    model = keras.Sequential([keras.Input((2,)), look])
    model.compile("sgd", "mse", steps_per_execution=steps)
    tf.function(lambda x: model(x)).get_concrete_function(np.ones((2, 2)))
    assert not any(look.seen)
    for run in (lambda x: model.evaluate(x, x, 1, 0), lambda x: model.predict(x, 1, 0)):
        look.seen.clear()
        run(np.ones((4, 2)))
        assert look.seen and all(look.seen)


# ---- The reasons: when one fails, what it is a reason for may go ----


def test_keras_rounds_raw_inputs():
    with tfamp.policy_scope("mixed_bfloat16"):
        layer = keras.layers.Normalization(mean=2014.5, variance=0.25)
        assert np.ptp(layer(np.array([[2014.0, 2015.0]]))) == 0
        model = keras.Sequential([keras.layers.Discretization([2014.5])])
        assert np.ptp(model(np.array([[2014.0], [2015.0]]))) == 0


def test_keras_compares_class_ids_in_the_format_of_the_outputs():
    metric = keras.metrics.SparseCategoricalAccuracy()
    outputs = tf.one_hot([256], 258, dtype=tf.bfloat16)
    metric.update_state(np.array([257]), outputs)
    assert metric.result() == 1


def test_keras_accumulates_on_one_device_only():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        weight = keras.Variable([1.0])
        optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
        optimizer.build([weight])
    step = tf.function(lambda: strategy.run(optimizer.apply, ([weight.value],)))
    with pytest.raises(RuntimeError, match="merge_call"):
        step()


def test_keras_squares_rows_of_one_index_apart():
    moved = []
    for rows in ([[1.0], [1.0]], [[2.0]]):
        adam, variable = keras.optimizers.Adam(0.1), keras.Variable([[1.0]])
        adam.build([variable])
        indices = tf.zeros([len(rows)], "int32")
        gradient = tf.IndexedSlices(tf.constant(rows), indices, tf.constant([1, 1]))
        adam.apply([gradient], [variable])
        moved.append(float(adam._velocities[0][0, 0]))
    assert moved[0] < 0.6 * moved[1]


def test_tensorflow_sums_bias_gradients_in_bfloat16():
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("measured on CPUs")
    bias = tf.zeros([1], tf.bfloat16)
    with tf.GradientTape() as tape:
        tape.watch(bias)
        y = tf.nn.bias_add(tf.ones([4096, 1], tf.bfloat16), bias)
    assert float(tape.gradient(y, bias)[0]) == 256


def test_keras_divides_gradients_that_nothing_scaled():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    variable = keras.Variable([0.0])
    optimizer.build([variable])
    optimizer.apply([tf.constant([2.0**15])], [variable])
    assert float(variable[0]) == -1


def test_keras_rematerializes_no_layer_in_fit():
    with keras.RematScope("full"):
        dropped = keras.layers.Dropout(0.5)
    model = keras.Sequential([keras.Input((2,)), dropped, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="keywords"):
        model.train_on_batch(np.ones((2, 2)), np.ones((2, 1)))


def test_tensorflow_computes_in_one_format_only():
    wide, low = tf.ones([2]), tf.ones([2], tf.bfloat16)
    with pytest.raises(tf.errors.InvalidArgumentError, match="was expected to be a"):
        tf.add(wide, low)
    with pytest.raises(TypeError, match="'AddV2' Op"):
        tf.function(tf.add)(wide, low)
    with pytest.raises(ValueError, match="requires tf.float32"):
        tf.signal.rfft(low)
    with pytest.raises(ValueError, match="requires tf.float32"):
        tf.signal.stft(low, 2, 1, window_fn=tf.signal.hamming_window)
    with pytest.raises(tf.errors.NotFoundError, match="Lgamma"):
        tf.math.lgamma(low)
    for asked, given in ((wide, low), (low, wide)):
        with pytest.raises(ValueError, match="conversion requested"):
            tf.Variable(asked).assign(given)
        signed = tf.function(tf.identity, [tf.TensorSpec([2], asked.dtype)])
        with pytest.raises(TypeError, match="Can not cast"):
            signed(given)
        with pytest.raises(TypeError, match="have dtype"):
            tf.linalg.LinearOperatorDiag(asked).matvec(given)
    with pytest.raises(TypeError, match="must have dtype"):
        tf.linalg.LinearOperatorFullMatrix(tf.eye(2, dtype="bfloat16"))
    multiply = tf.function(tf.matmul).get_concrete_function(wide[None], low[:, None])
    kinds = {operation.type for operation in multiply.graph.get_operations()}
    assert "SparseMatMul" in kinds  # A GPU has none, and `tf.vectorized_map`.


def test_tensorflows_loops_hold_one_format():
    wide, low = tf.ones([2]), tf.ones([2], tf.bfloat16)

    @tf.function
    def loop():
        state = low
        for _ in tf.range(2):
            state = wide
        return state

    with pytest.raises(TypeError, match="dtype"):
        loop()
    for first, other in ((low, wide), (wide, low)):
        with pytest.raises(TypeError, match="bfloat16"):
            tf.function(tf.while_loop)(
                lambda i, state: i < 2, lambda i, state, x=other: (i + 1, x), [0, first]
            )
        with pytest.raises(tf.errors.InvalidArgumentError, match="TensorArray dtype"):
            tf.TensorArray(first.dtype, 2).write(0, other)
    with pytest.raises(TypeError):
        tf.function(tf.switch_case)(tf.constant(0), [lambda: low, lambda: wide])


def test_tensorflow_resizes_no_16_bits():
    images = tf.ones([1, 4, 4, 1], tf.bfloat16)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(images)
        bicubic = tf.image.resize(images, (6, 6), "bicubic")
        smooth = tf.image.resize(images, (2, 2), antialias=True)
    assert tape.gradient(bicubic, images) is None
    with pytest.raises(tf.errors.InvalidArgumentError, match="ScaleAndTranslateGrad"):
        tape.gradient(smooth, images)


def test_tensorflow_takes_a_gradient_in_one_format_only():
    low = tf.ones([2], tf.bfloat16)

    @tf.custom_gradient
    def masked(x):
        return tf.sign(x), lambda slope: tf.cast(slope, "float32")

    with tf.GradientTape() as tape:
        tape.watch(low)
        y = masked(tf.function(tf.tanh)(low))
    with pytest.raises(tf.errors.InvalidArgumentError, match="float"):
        tape.gradient(y, low)


def test_a_copy_of_an_output_has_no_gradient():
    x = tf.ones([2], tf.bfloat16)
    with tf.GradientTape() as tape:
        tape.watch(x)
        hidden = x * 2
        copy, output = tf.cast(hidden, "float32"), hidden * 3
    assert tape.gradient(output, copy) is None


def test_tensorflow_sums_losses_in_16_bits():
    x = tf.fill([4, 300], tf.constant(100.0, tf.float16))
    keras_mean = keras.ops.mean(keras.ops.square(x) * 10)
    sums = [tf.reduce_sum(x), tf.nn.l2_loss(x), tf.norm(x), keras_mean]
    assert {each.dtype for each in sums} == {tf.float16}
    assert np.isinf(sums[0])


def test_tensorflows_dropout_misses_the_share_in_bfloat16():
    x = tf.ones([2**20], tf.bfloat16)
    y = tf.nn.experimental.stateless_dropout(x, 0.1, seed=[1, 2])
    assert np.mean(np.asarray(y, "float32") == 0) == pytest.approx(13 / 128, abs=1e-3)


SEVERAL = {
    "gelu": lambda x: lambda: keras.ops.gelu(x),
    "silu": lambda x: lambda: keras.ops.silu(x),
    "layer_normalization": lambda x: lambda: keras.ops.layer_normalization(x),
}
FREE = {"Const", "Identity", "NoOp", "Placeholder", "ReadVariableOp"}


@pytest.mark.parametrize("name", SEVERAL)
def test_keras_runs_these_as_several_operations(name):
    """Each a pass over memory; with one, no kernel of our own is needed."""
    if patches.BY_NAME[name].what in LACKED:
        pytest.skip(f"Keras {keras.__version__} has none")
    step = tf.function(SEVERAL[name](tf.ones([4, 8], tf.bfloat16)))
    found = [op.type for op in step.get_concrete_function().graph.get_operations()]
    assert len([kind for kind in found if kind not in FREE]) >= 2, found


def test_keras_runs_an_update_as_many_operations():
    adam, variable = keras.optimizers.Adam(0.1), keras.Variable(tf.ones([4, 8]))
    adam.build([variable])
    step = tf.function(lambda gradient: adam.apply([gradient], [variable]))
    graph = step.get_concrete_function(tf.ones([4, 8])).graph
    assert sum(op.type not in FREE for op in graph.get_operations()) > 20


def test_keras_runs_a_step_as_many_operations():
    """And `fit` looks the steps up in the model's class."""
    layer = keras.layers.Dense(4, "gelu")
    step = tf.function(lambda x: layer(x)).get_concrete_function(tf.ones([2, 8]))
    kinds = [op.type for op in step.graph.get_operations()]
    assert "XlaLaunch" not in kinds and len([x for x in kinds if x not in FREE]) > 5
    for name in ("train_step", "test_step", "predict_step"):
        assert name in vars(patches.BY_NAME[name].find())


def test_tensorflow_takes_a_kernels_gradient_for_each_row():
    x, kernel = tf.ones([5, 3, 4]), tf.ones([4, 2])

    @tf.function
    def gradient():
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            y = tf.matmul(x, kernel)
        return tape.gradient(y, kernel)

    operations = gradient.get_concrete_function().graph.get_operations()
    shapes = [op.outputs[0].shape.as_list() for op in operations if op.outputs]
    assert [5, 4, 2] in shapes


def test_shapes_that_are_known_are_found_when_traced():
    known, found = names.resolve(programs._KNOWN), []

    @tf.function(autograph=False)
    def trace(x):
        found.extend(map(known, (tf.shape(x)[:1] * 2, tf.size(x), x)))

    trace.get_concrete_function(tf.ones([3, 4]))
    assert [np.asarray(x).tolist() for x in found] == [[6], 12, None]


def test_an_operators_input_and_what_comes_after_it_can_be_reached():
    @tf.function(autograph=False)
    def step(x):
        first, second = tf.add(x, 1.0), tf.add(x, 2.0)
        with tf.control_dependencies([first]):
            third = tf.multiply(second, second)
        assert third.op in first.op._control_outputs
        third.op._update_input(0, first)
        assert first.op.op_def.is_stateful is False
        return third

    assert float(step(1.0)) == 6


COUNTED = """
import os, pathlib, sys
os.environ["XLA_FLAGS"] = f"--xla_dump_to={sys.argv[1]} --xla_dump_hlo_as_text"
import keras, numpy as np
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", jit_compile=True)
data = np.ones((10, 2)), np.ones((10, 1))
model.fit(*data, batch_size=4, epochs=2, verbose=0, validation_data=data)
names = "*one_step_on_data*before_optimizations*"
print(len([*pathlib.Path(sys.argv[1]).glob(names)]))
"""


def test_keras_compiles_the_rest_of_an_epoch(tmp_path):
    """Training and validation, each for batches of 4 rows and of 2."""
    command = [sys.executable, "-c", COUNTED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "4"


def test_every_patch_says_where_it_is_filed_and_is_on_the_page_on_the_design():
    """And when it may go."""
    root = pathlib.Path(__file__).parents[2]
    page = (root / "docs/maintainers/design.md").read_text()
    for key, listed in patches.UPSTREAM.items():
        assert key.startswith(("https://github.com/", "not filed; symptom"))
        thread, _, reason = key.rpartition("; remove when ")
        assert {*re.findall(r"test_\w+", reason)} <= {*globals()} and thread
        assert thread.removeprefix("not filed; symptom: ").split()[0] in page
        assert re.sub(r"(test_\w+)", r"`\1`", reason) in page
        for patch in listed:
            name = f"{patch.owner.replace(':', '.')}.{patch.name}"
            assert f"| `{name}` | {patch.what} |" in page


def test_keras_looks_for_a_gpu_when_it_traces_recurrent_layers():
    """And when it makes them: on one they are cuDNN's, which XLA does not compile."""
    patch = patches.BY_NAME["_is_gpu_available"]
    layer = keras.layers.LSTM(4)
    layer.build((2, 3, 5))
    with hooks.HookGroup(_is_gpu_available=lambda own: lambda: True).installed():
        assert patch.find()._is_gpu_available()
        assert not keras.layers.LSTM(4).supports_jit
        step = tf.function(layer).get_concrete_function(tf.TensorSpec((2, 3, 5)))
    kinds = {op.type for op in step.graph.get_operations()}
    assert "CudnnRNNV3" in kinds
    assert not patch.find()._is_gpu_available() and keras.layers.LSTM(4).supports_jit
