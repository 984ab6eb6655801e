"""Matrix work of a training step, against closed formulas and TensorFlow's profiler."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfamp.benchmark import step_flops
from tfamp.precision import control, policy

layers = keras.layers
BATCH = 4
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mean(labels, outputs):
    return tf.reduce_mean(tf.cast(outputs, tf.float32))


def count(model, shape, loss=mean, dtype="float32", labels=None):
    features = np.zeros((BATCH, *shape), dtype)
    labels = np.zeros(BATCH, "int32") if labels is None else labels
    return step_flops.count(model, loss, (features, labels))


def stack(shape, *inner):
    return keras.Sequential([keras.Input(shape), *inner])


def test_dense_layers_count_three_products_but_for_the_input_gradient_of_the_first():
    model = stack((20,), layers.Dense(12, "relu"), layers.Dense(5))
    found = count(model, (20,), CROSS_ENTROPY)
    first, second = 2 * BATCH * 12 * 20, 2 * BATCH * 5 * 12
    assert found.flops == 2 * first + 3 * second
    sizes = [BATCH * 20 + 20 * 12 + BATCH * 12, BATCH * 12 + 12 * 5 + BATCH * 5]
    assert found.elements == 2 * sizes[0] + 3 * sizes[1]
    assert found.uncounted == ()


def test_nothing_is_changed_and_labels_count_nothing():
    model = stack((20,), layers.Dense(12), layers.Dropout(0.5), layers.Dense(5))
    before = [np.array(variable) for variable in model.variables]
    attributes = [dict(vars(layer)) for layer in model.layers]
    count(model, (20,), CROSS_ENTROPY)
    for variable, old in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(np.array(variable), old)
    assert [vars(layer).keys() for layer in model.layers] == [
        old.keys() for old in attributes
    ]


CONVOLUTIONS = {
    # Shape of the input, layer, operations forward: 2 x results x area x channels.
    "valid": ((9, 9, 6), lambda: layers.Conv2D(10, 3), 2 * 49 * 10 * 9 * 6),
    "strided": (
        (9, 9, 6),
        lambda: layers.Conv2D(10, 3, strides=2, padding="same"),
        2 * 25 * 10 * 9 * 6,
    ),
    "grouped": ((9, 9, 6), lambda: layers.Conv2D(8, 3, groups=2), 2 * 49 * 8 * 9 * 3),
    "1-D": ((9, 6), lambda: layers.Conv1D(10, 3), 2 * 7 * 10 * 3 * 6),
    "3-D": ((5, 5, 5, 3), lambda: layers.Conv3D(4, 2), 2 * 64 * 4 * 8 * 3),
    "depthwise": (
        (9, 9, 6),
        lambda: layers.DepthwiseConv2D(3, depth_multiplier=2),
        2 * 49 * 12 * 9,
    ),
    # Each position of the input meets the kernel once.
    "transposed": ((5, 5, 6), lambda: layers.Conv2DTranspose(4, 3), 2 * 25 * 6 * 9 * 4),
}


@pytest.mark.parametrize(
    ("shape", "make", "forward"), CONVOLUTIONS.values(), ids=CONVOLUTIONS
)
def test_convolutions_count_the_same_forward_and_for_each_gradient(
    shape, make, forward
):
    # Nothing before it needs a gradient.
    assert count(stack(shape, make()), shape).flops == 2 * BATCH * forward
    # Now a layer of weights does, which multiplies no matrices.
    both = count(stack(shape, layers.PReLU(), make()), shape)
    assert both.flops == 3 * BATCH * forward
    assert both.uncounted == ()


def test_forward_counts_are_those_of_tensorflows_profiler():
    model = stack(
        (9, 9, 6),
        layers.Conv2D(4, 3, use_bias=False),
        layers.DepthwiseConv2D(2, use_bias=False),
        layers.Flatten(),
        layers.Dense(7, use_bias=False),
    )
    model.trainable = False  # No gradients.
    function = tf.function(model).get_concrete_function(tf.TensorSpec([BATCH, 9, 9, 6]))
    options = tf.compat.v1.profiler.ProfileOptionBuilder.float_operation()
    options["output"] = "none"
    profile = tf.compat.v1.profiler.profile(function.graph, options=options)
    found = count(model, (9, 9, 6))
    assert found.flops == profile.total_float_ops


def test_attention_counts_its_einsums():
    inputs = keras.Input((6, 16))
    model = keras.Model(inputs, layers.MultiHeadAttention(2, 5)(inputs, inputs))
    found = count(model, (6, 16))
    tokens, width, inner = BATCH * 6, 16, 10
    projections = 2 * tokens * width * inner
    products = 2 * tokens * 6 * inner
    # Forward and the weights' gradients; that to the inputs only after the first three.
    assert found.flops == 2 * 4 * projections + projections + 3 * 2 * products
    assert found.uncounted == ()


def count_bert(scope):
    keras_hub = pytest.importorskip("keras_hub")
    with scope:
        backbone = keras_hub.models.BertBackbone(
            vocabulary_size=50,
            num_layers=2,
            num_heads=2,
            hidden_dim=16,
            intermediate_dim=32,
            max_sequence_length=12,
        )
        ids = np.zeros((BATCH, 12), "int32")
        features = {
            "token_ids": ids,
            "segment_ids": ids,
            "padding_mask": np.ones_like(ids),
        }

        def loss(labels, outputs):
            return mean(labels, outputs["sequence_output"])

        return step_flops.count(backbone, loss, (features, ids))


def test_bert_counts_its_formula_in_every_mode_also_with_fused_kernels():
    found = count_bert(policy.policy_scope("float32"))
    tokens, length, width, inner = BATCH * 12, 12, 16, 32
    dense = 2 * tokens * (4 * width**2 + 2 * width * inner)
    attention = 4 * tokens * length * width
    # The pooled output is not in this loss.
    assert found.flops == 3 * 2 * (dense + attention)
    assert found.uncounted == ()
    assert count_bert(policy.policy_scope("mixed_float16")) == found
    assert count_bert(control.enabled("mixed_bfloat16")) == found


@pytest.mark.parametrize(
    "scope",
    [
        lambda: policy.policy_scope("mixed_bfloat16"),
        lambda: control.enabled("mixed_float16"),
    ],
    ids=["policy of mixed_bfloat16", "mixed_float16 enabled"],
)
def test_a_convolutional_network_counts_the_same_in_every_mode(scope):
    def make():
        return stack(
            (8, 8, 3),
            layers.Conv2D(8, 3, activation="gelu"),
            layers.BatchNormalization(),
            layers.Dropout(0.2),
            layers.Flatten(),
            layers.Dense(10, dtype="float32"),
        )

    with policy.policy_scope("float32"):
        expected = count(make(), (8, 8, 3), CROSS_ENTROPY)
    with scope():
        assert count(make(), (8, 8, 3), CROSS_ENTROPY) == expected


@pytest.mark.parametrize("unroll", [False, True])
def test_recurrent_layers_count_every_step(unroll):
    model = stack((9, 6), layers.LSTM(8, unroll=unroll))
    found = count(model, (9, 6))
    kernel, recurrent = 2 * BATCH * 6 * 32, 2 * BATCH * 8 * 32
    # To the inputs there is no gradient; the first state is a constant, too, which the
    # loop does not know.
    dropped = recurrent if unroll else 0
    assert found.flops == 9 * (2 * kernel + 3 * recurrent) - dropped
    assert found.uncounted == ()


def test_loops_of_unknown_length_are_named_and_counted_once():
    class Repeated(layers.Layer):
        def build(self, input_shape):
            self.kernel = self.add_weight(shape=(6, 6))

        def call(self, x):
            rounds = tf.cast(tf.reduce_sum(tf.abs(x)), tf.int32)
            return tf.while_loop(
                lambda i, x: i < rounds,
                lambda i, x: (i + 1, tf.matmul(x, self.kernel)),
                (0, x),
            )[1]

    found = count(stack((6,), Repeated()), (6,))
    assert found.flops == 3 * 2 * BATCH * 6 * 6
    assert [note.partition(" is ")[2] for note in found.uncounted] == [
        "counted once: its number of rounds is not known"
    ] * 2


class Called(layers.Layer):
    """A product in what `wrap` makes of it."""

    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(6, 6))

    def call(self, x):
        kernel = tf.convert_to_tensor(self.kernel)
        return self.wrap(lambda x: tf.matmul(x, kernel))(x)


def branched(product):
    """Two products or one, by what the numbers are."""
    return lambda x: tf.cond(
        tf.reduce_sum(x) > 0, lambda: product(product(x)), lambda: product(x)
    )


NESTED = {
    "function": (tf.function, 1),
    "function compiled by XLA": (lambda f: tf.function(f, jit_compile=True), 1),
    "longer branch": (branched, 2),
    "map over examples": (
        lambda f: lambda x: tf.map_fn(lambda row: f(row[None])[0], x),
        1,
    ),
}


@pytest.mark.parametrize(("wrap", "times"), NESTED.values(), ids=NESTED)
def test_products_in_functions_count_once(wrap, times):
    found = count(stack((6,), layers.Dense(6), Called(wrap)), (6,))
    dense = 2 * 2 * BATCH * 6 * 6
    assert found.flops == dense + times * 3 * 2 * BATCH * 6 * 6
    assert found.uncounted == ()


def test_python_functions_and_unknown_shapes_are_named():
    class Odd(layers.Layer):
        def call(self, x):
            y = tf.py_function(lambda x: x @ tf.transpose(x), [x], tf.float32)
            y.set_shape([BATCH, BATCH])
            rows = tf.boolean_mask(x, x[:, 0] > 0)
            return y + tf.reduce_sum(tf.matmul(rows, tf.ones([6, 6])))

    found = count(stack((6,), layers.Dense(6), Odd()), (6,))
    reasons = {note.split(": ")[1] for note in found.uncounted}
    assert reasons == {"no rule for EagerPyFunc", "a shape is not known"}


def test_kernels_of_cudnn_count_their_weights_forward_and_backward():
    steps, features, units = 7, 6, 8

    class Cudnn(layers.Layer):
        """As Keras calls an LSTM on a GPU; not run here."""

        def build(self, input_shape):
            count = 4 * units * (features + units + 2)
            self.kernel = self.add_weight(shape=(count,))

        def call(self, x):
            state = tf.zeros([1, BATCH, units])
            lengths = tf.fill([BATCH], steps)
            kernel = tf.convert_to_tensor(self.kernel)
            outputs = tf.raw_ops.CudnnRNNV3(
                input=tf.transpose(x, [1, 0, 2]),
                input_h=state,
                input_c=state,
                params=kernel,
                sequence_lengths=lengths,
                is_training=True,
            )
            return outputs[0]

        def compute_output_shape(self, shape):
            return (steps, BATCH, units)

    model = stack((steps, features), Cudnn())
    found = count(model, (steps, features))
    forward = steps * 2 * BATCH * 4 * units * (features + units)
    assert found.flops == 3 * forward
    assert found.uncounted == ()
