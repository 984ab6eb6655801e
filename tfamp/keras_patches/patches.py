"""Every function of Keras and TensorFlow that `enable`, or an audit, replaces.

`UPSTREAM` is the list, read in TensorFlow 2.21 and Keras 3.15. Where a release lacks a
name, the patch stays out, and `status()` says so. tests/upstream guards each row, and
fails when the reason for one is gone.
"""

from tfamp.facts import names
from tfamp.keras_patches.patch import Patch

_TRAINS = ("keras.src.backend.common.global_state:get_global_attribute",)
_DRAWS = (*_TRAINS, "keras.src.random.seed_generator:draw_seed")
CALLS = (
    *_TRAINS,
    "keras.src.backend.common.stateless_scope:in_stateless_scope",
    "keras.src.saving.serialization_lib:in_safe_mode",
)
RECORDS = "tensorflow.python.eager.record:could_possibly_record"
STOPS = "tensorflow.python.eager.record:stop_recording"
WATCHES = "tensorflow.python.eager.record:VariableWatcher"
GLOBALS = (*_TRAINS, "keras.src.backend.common.global_state:set_global_attribute")
REMAT = (RECORDS, STOPS, WATCHES, *GLOBALS)
_MEET, _EAGER = "float32 where formats meet", "eager operators"
_ALONE = "float32 where a function takes nothing else"
_LINEAR = f"{_MEET} in linear operators"
OPERATORS = (  # TensorFlow's registries of kernels, and of operators.
    "tensorflow.python.framework.kernels:get_registered_kernels_for_op",
    "tensorflow.python.framework.op_def_registry:get",
)
_SUMS = "tensorflow.python.ops.gen_math_ops"
_LOSSES = "losses summed in float32"
_SEVERAL = "remove when test_keras_runs_these_as_several_operations fails"
# Functions that look at formats themselves, and where they are; "inner": for others.
OF_FLOAT32 = {
    "inner_rfft": "tensorflow.python.ops.signal.fft_ops",
    **dict.fromkeys(("rfft", "rfft2d", "rfft3d"), "tensorflow:signal"),
    **dict.fromkeys(("eig", "eigvals"), "tensorflow:linalg"),
    **dict.fromkeys(("stft", "istft"), "keras.src.backend:math"),
    **dict.fromkeys(
        ("affine_transform", "perspective_transform"), "keras.src.backend:image"
    ),
    "lstsq": "keras.src.backend:linalg",
}
# The thread, or "not filed" and the symptom; when the patches may go: a test is one of
# tests/upstream/test_keras_contract.py.
UPSTREAM = {
    "https://github.com/tensorflow/tensorflow/issues/86378; remove when "
    "test_tensorflow_sums_bias_gradients_in_bfloat16 fails": (
        Patch("biases", "tensorflow.python.framework.registry:Registry", "lookup"),
    ),
    "not filed; symptom: EinsumDense's kernel gradient takes a batch times the memory; "
    "remove when test_tensorflow_takes_a_kernels_gradient_for_each_row fails": (
        Patch(
            "kernel gradients in one product",
            "tensorflow.python.framework.registry:Registry",
            "lookup",
            alias="product_lookup",
        ),
    ),
    "not filed; symptom: gradient rows of the same index are squared separately, in "
    "Adam's second moment and in the clipping norm; remove when "
    "test_keras_squares_rows_of_one_index_apart fails": (
        Patch("embeddings", "keras:Optimizer", "apply"),
        Patch("embeddings of replicas", "keras:Optimizer", "_all_reduce_sum_gradients"),
    ),
    "https://github.com/keras-team/keras/issues/19308; remove when "
    "test_keras_accumulates_on_one_device_only fails": (
        Patch(
            "gradient accumulation over replicas",
            "keras:Optimizer",
            "_backend_apply_gradients",
        ),
        Patch("accumulators of each replica", "keras:Optimizer", "build"),
    ),
    "not filed; symptom: drops 10.2 % for a rate of 0.1 in bfloat16; remove when "
    "test_tensorflows_dropout_misses_the_share_in_bfloat16 fails": (
        Patch("dropout", "keras.src.backend:random", "dropout", _DRAWS),
    ),
    f"not filed; symptom: slow in 16 bits on a CPU; {_SEVERAL}": (
        Patch("GELU", "keras.src.backend:nn", "gelu", _TRAINS),
        Patch("SiLU", "keras.src.backend:nn", "silu", _TRAINS),
    ),
    f"https://github.com/keras-team/keras/issues/20003; {_SEVERAL}": (
        Patch("layer normalization", "keras.src.ops", "layer_normalization", _TRAINS),
    ),
    "https://github.com/keras-team/keras/issues/18648 and 19992; remove when "
    "test_keras_runs_an_update_as_many_operations fails": (
        Patch(
            "optimizers' updates in one program, or Adam's in one kernel",
            "keras:Optimizer",
            "apply",
            (
                "keras:Optimizer._backend_apply_gradients",
                "keras.optimizers:Adam._get_variable_index",
            ),
            "compiled_apply",
        ),
    ),
    "not filed; symptom: each small operator is a launch on a GPU; remove when "
    "test_keras_runs_a_step_as_many_operations fails": tuple(
        Patch("small operators in few programs", "keras:Model", name)
        for name in ("train_step", "test_step", "predict_step")
    ),
    "https://github.com/keras-team/keras/issues/19418; remove when "
    "test_keras_has_no_flash_attention fails": (
        Patch("attention", "keras.src.backend:nn", "dot_product_attention"),
        Patch(
            "attention of layers with dropout",
            "keras.layers:MultiHeadAttention",
            "_compute_attention",
            _DRAWS,
        ),
        Patch(
            "attention of grouped layers with dropout",
            "keras.layers:GroupQueryAttention",
            "_compute_attention",
            _DRAWS,
            "grouped_attention",
        ),
    ),
    "https://github.com/keras-team/keras/issues/15012 and 19332; remove when "
    "test_keras_compares_class_ids_in_the_format_of_the_outputs and "
    "test_keras_rounds_raw_inputs fail": (
        Patch(
            "a model's first call, and its outputs", "keras:Layer", "__call__", CALLS
        ),
        Patch(
            "raw values outside of models",
            "keras.layers:Rescaling",
            "__call__",
            CALLS,
            "data_layer",
        ),
    ),
    "https://github.com/tensorflow/tensorflow/issues/49460; remove when "
    "test_tensorflow_computes_in_one_format_only fails": (
        Patch(_MEET, "tensorflow.python.util.dispatch", "dispatch"),
        Patch(_MEET, "tensorflow:Tensor", "__tf_tensor__"),
        Patch(
            "float32 for numbers that float16 cannot hold",
            "tensorflow.python.framework.constant_op",
            "constant",
        ),
        Patch(
            "float32 for numbers that float16 cannot hold",
            "tensorflow.python.framework.override_binary_operator",
            "maybe_promote_tensors",
            is_hot=True,
        ),
        *(
            Patch(f"{_MEET} in {what}", owner, name, OPERATORS, "", name[0] == "T")
            for what, owner, name in (
                (
                    "operators of graphs",
                    "tensorflow.python.framework.op_def_library",
                    "_apply_op_helper",
                ),
                (_EAGER, "tensorflow.python.pywrap_tfe", "TFE_Py_FastPathExecute"),
                (_EAGER, "tensorflow.python.eager.execute", "execute"),
            )
        ),
        *(
            Patch(_ALONE, owner, name.removeprefix("inner_"), alias=name)
            for name, owner in OF_FLOAT32.items()
        ),
        Patch(
            f"{_MEET} in products", "tensorflow.python.ops.math_ops", "sparse_matmul"
        ),
        Patch(
            f"{_MEET} in signatures", "tensorflow:TensorSpec", "cast", (), "spec_cast"
        ),
        Patch(_LINEAR, "tensorflow:linalg.LinearOperator", "_check_input_dtype"),
        Patch(_LINEAR, "tensorflow:linalg.LinearOperatorFullMatrix", "_check_matrix"),
    ),
    "not filed; symptom: a loop's state or a branch's result of two formats is an "
    "error; remove when test_tensorflows_loops_hold_one_format fails": (
        Patch("one format in loops", "tensorflow.python.ops.while_loop", "while_loop"),
        Patch(
            "one format in loops of AutoGraph's",
            "tensorflow.python.autograph.operators.control_flow",
            "_tf_while_stmt",
        ),
        Patch(
            "one format of branches",
            "tensorflow.python.ops.cond_v2",
            "_check_same_outputs",
        ),
        Patch(
            "one format of branches of AutoGraph's",
            "tensorflow.python.autograph.operators.control_flow",
            "verify_single_cond_var",
        ),
    ),
    "not filed; symptom: gradients of bicubic and antialiased resizing by 16 bits are "
    "None, or an error; remove when test_tensorflow_resizes_no_16_bits fails": (
        Patch(
            "gradients in the formats of inputs",
            "tensorflow.python.framework.registry:Registry",
            "lookup",
            alias="gradient_lookup",
        ),
    ),
    "not filed; symptom: a gradient of float32 for what a function or loop returned in "
    "16 bits is an error; remove when "
    "test_tensorflow_takes_a_gradient_in_one_format_only fails": (
        Patch(
            "gradients in the formats of what is differentiated",
            "tensorflow.python.eager.record",
            "record_operation",
        ),
    ),
    "not filed; symptom: the gradient by a float32 copy of an output is None; remove "
    "when test_a_copy_of_an_output_has_no_gradient fails": (
        Patch(
            "gradients by what a model returns",
            "tensorflow:GradientTape",
            "gradient",
            alias="output_gradient",
        ),
    ),
    "not filed; symptom: a loss that is a sum over batch and pixels is inf in float16; "
    "remove when test_tensorflow_sums_losses_in_16_bits fails": (
        *(
            Patch(_LOSSES, _SUMS, name)
            for name in ("_sum", "mean", "prod", "euclidean_norm")
        ),
        Patch(_LOSSES, "tensorflow:nn", "l2_loss"),
        Patch(_LOSSES, "tensorflow", "norm"),
        *(
            Patch(_LOSSES, "tensorflow:TensorArray", name)
            for name in ("write", "scatter", "unstack", "split")
        ),
        Patch(_LOSSES, "tensorflow:linalg", "norm", (), "linalg_norm"),
        Patch(
            _LOSSES,
            "keras.src.backend:numpy",
            "mean",
            (),
            "keras_mean",
        ),
    ),
    "not filed; symptom: `apply` divides by the loss scale in a `train_step` that did "
    "not scale the loss; remove when "
    "test_keras_divides_gradients_that_nothing_scaled fails": (
        Patch(
            "loss scaling in a custom train_step",
            "tensorflow:GradientTape",
            "gradient",
            (
                "tensorflow:GradientTape.stop_recording",
                RECORDS,
            ),
        ),
        Patch(
            "loss scaling in a custom train_step, plain optimizers",
            "keras:Optimizer",
            "apply",
            alias="step_apply",
        ),
    ),
    "https://github.com/keras-team/keras/issues/21448; remove when "
    "test_keras_rematerializes_no_layer_in_fit fails": (
        Patch(
            "layers that are computed again",
            "keras.src.backend:core",
            "remat",
            REMAT,
        ),
    ),
    "not filed; symptom: compile adds Keras' own LossScaleOptimizer and no other; "
    "remove when it takes the wrapper as an argument": (
        Patch(
            "the optimizer and overrides of a compiled model", "keras:Model", "compile"
        ),
    ),
    "https://github.com/keras-team/keras/issues/16100 (of skipped steps), else not "
    "filed; symptom: nothing is called once a model is built, or has run a step, "
    "whatever its callbacks; remove when Keras has such a hook": (
        Patch("the first training step", "keras:Model", "make_train_function"),
    ),
    "not filed; symptom: a recurrent layer's graph is that of this host's device; "
    "remove when test_keras_looks_for_a_gpu_when_it_traces_recurrent_layers fails": (
        Patch(
            "audits for a GPU of models with LSTM or GRU layers",
            "keras.src.backend.tensorflow.rnn",
            "_is_gpu_available",
        ),
    ),
    "https://github.com/keras-team/keras/issues/18456 (of operators that XLA lacks), "
    "else not filed; symptom: XLA compiles each size of a batch; remove when "
    "test_keras_compiles_the_rest_of_an_epoch fails": (
        Patch("evaluation under XLA", "keras:Model", "make_test_function"),
        Patch("prediction under XLA", "keras:Model", "make_predict_function"),
    ),
}
BY_NAME = {x.alias or x.name: x for rows in UPSTREAM.values() for x in rows}


def missing() -> dict[str, str]:
    """Returns {what is off: the names that this release lacks for it}."""
    rows = [(x.what, name) for x in BY_NAME.values() for name in x.lacks()]
    rows += [(what, x) for x, what in names.NAMES.items() if names.resolve(x) is None]
    return {x: ", ".join(sorted({n for y, n in rows if y == x})) for x, _ in rows}


def trainer_class() -> type:
    """Returns the class that defines `compile` for every Keras model.

    The attribute must be replaced there and nowhere below: on loading, Keras
    (<= 3.15) compares `model.__class__.compile` with it to tell whether a user
    overrode `compile`, and silently leaves a model uncompiled if so.
    """
    return BY_NAME["compile"].find()
