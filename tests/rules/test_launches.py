"""Launches of small graphs on a GPU that need not be there, and what they cost."""

import pytest
import tensorflow as tf

from tfamp.diagnostics import launch_rules, layer_facts, rules
from tfamp.facts import devices, hardware
from tfamp.inspect import launches

H100, T4 = hardware.DEVICES["h100"], hardware.DEVICES["t4"]
IMAGES, ROWS = (8, 16, 16, 4), (64, 32)


def ones(*shape):
    """A weight: a constant would be folded."""
    return tf.Variable(tf.ones(shape))


KERNEL, MATRIX, SEED = ones(3, 3, 4, 4), ones(32, 32), tf.Variable([1, 2])


@tf.function(jit_compile=True, autograph=False)
def few(x):
    return tf.reduce_sum(tf.exp(x) * 2.0, 1), tf.tanh(x)


@tf.function(jit_compile=True, autograph=False)
def many(x):
    return [tf.tanh(x) * n + tf.reduce_sum(x, n % 2, keepdims=True) for n in range(3)]


def loop(x, turns):
    counter = tf.constant(0)
    bounded = lambda i, y: i < turns  # noqa: E731
    return tf.while_loop(bounded, lambda i, y: (i + 1, tf.exp(y)), (counter, x))[1]


# What runs on x, its shape, and: launches, casts, graphs, copies to the host.
CASES = {
    "two operators": (lambda x: tf.exp(tf.tanh(x)), ROWS, (2, 0, 0, 0)),
    "a view": (lambda x: tf.exp(tf.reshape(x, [-1])), ROWS, (1, 0, 0, 0)),
    "a cast": (lambda x: tf.exp(tf.cast(x, tf.bfloat16)), ROWS, (2, 1, 0, 0)),
    "a product": (lambda x: x @ MATRIX, ROWS, (1, 0, 0, 0)),
    "axes in another order": (lambda x: tf.exp(tf.transpose(x)), ROWS, (2, 0, 0, 0)),
    "axes of one element": (
        lambda x: tf.exp(tf.transpose(x, [1, 0, 2])),
        (1, 64, 32),
        (1, 0, 0, 0),
    ),
    "a short sum": (lambda x: tf.reduce_sum(x), ROWS, (1, 0, 0, 0)),
    "a long sum": (lambda x: tf.reduce_sum(x), (640, 32), (2, 0, 0, 0)),
    "a sum of rows": (lambda x: tf.reduce_sum(x, 1), (4, 9999), (1, 0, 0, 0)),
    "a number for the device, then for the host twice": (
        lambda x: [f(tf.exp(x[0, 0])) for f in (tf.tanh, tf.print, tf.print)][0],
        ROWS,
        (3, 0, 0, 1),
    ),
    "a loop": (lambda x: loop(x, 5), ROWS, (5, 0, 0, 0)),
    "a loop in a loop": (
        lambda x: tf.while_loop(
            lambda i, y: i < 3, lambda i, y: (i + 1, loop(y, 5)), (0, x)
        )[1],
        ROWS,
        (15, 0, 0, 0),
    ),
    "a small program": (lambda x: few(x), ROWS, (2, 0, 0, 0)),
    "a program": (lambda x: many(x), ROWS, (1, 0, 1, 0)),
    "a seed": (  # It is read by the host: a launch draws.
        lambda x: x + tf.random.stateless_uniform(ROWS, SEED),
        ROWS,
        (2, 0, 0, 1),
    ),
    "what only the host does": (
        lambda x: tf.strings.length(tf.strings.as_string(tf.exp(x))),
        ROWS,
        (1, 0, 0, 1),
    ),
}


def traced(function, shape, dtype=tf.float32):
    function = tf.function(function, autograph=False)
    return function.get_concrete_function(tf.TensorSpec(shape, dtype)).graph


@pytest.mark.parametrize(("function", "shape", "expected"), CASES.values(), ids=CASES)
def test_launches(function, shape, expected):
    found = launches.count(traced(function, shape), H100)
    assert (found.total, found.casts, found.graphs, found.copies) == expected


def convolve(x):
    return tf.nn.conv2d(x, tf.cast(KERNEL, x.dtype), 1, "SAME")


def test_the_layout_of_a_convolution_is_the_devices():
    """float16 is computed as it is on Tensor Cores; float32 with the channels first."""
    counts = {
        dtype.name: launches.count(traced(convolve, IMAGES, dtype), H100).total
        for dtype in (tf.float16, tf.float32)
    }
    # Two for the convolution; the kernel's cast, or the layout there and back.
    assert counts == {"float16": 3, "float32": 4}


def test_bytes_are_those_that_launches_take_and_make():
    found = launches.count(traced(lambda x: tf.exp(tf.tanh(x)), ROWS), H100)
    assert found.moved == 2 * 2 * 64 * 32 * 4


def test_parts_are_told_by_names_and_by_what_is_taken():
    def step(x):
        with tf.GradientTape() as tape:
            with tf.name_scope("forward"):
                y = tf.tanh(x @ MATRIX)
            loss = tf.reduce_sum(y)
        (gradient,) = tape.gradient(loss, [MATRIX])
        with tf.name_scope("update"):
            MATRIX.assign_sub(tf.exp(gradient))
        return loss

    found = launches.count(traced(step, ROWS), H100)
    assert found.parts == {"forward": 3, "backward": 2, "update": 2}


@pytest.mark.parametrize(
    ("function", "shape", "total"),
    [(lambda x: tf.exp(x) @ MATRIX, ROWS, 1), (convolve, IMAGES, 3)],
    ids=["one graph", "a convolution in between"],
)
def test_a_step_under_xla_is_graphs_around_calls(function, shape, total):
    found = launches.count_compiled(traced(function, shape))
    assert found.parts == {"step": total} and found.moved is None


def test_operators_that_xla_does_not_compile():
    graph = traced(lambda x: tf.strings.as_string(few(tf.exp(x))[0]), ROWS)
    assert launches.refused_by_xla(graph) == ["AsString"]


# ---- What they cost ----


def test_peaks_are_those_of_the_table_of_devices():
    known = {device.name: device for device in hardware.DEVICES.values()}
    for name, peak in devices.PEAKS.items():
        has_tf32 = hardware.describe_support(known[name])["tf32"].fast
        assert has_tf32 == (peak.tf32 is not None)
        assert peak.low > (peak.tf32 or peak.float32) >= peak.float32


@pytest.mark.parametrize(
    ("device", "name", "rate"),
    [
        (H100, "bfloat16", 989),
        (H100, "tf32", 494),
        (H100, "float32", 67),
        (T4, "float16", 65),
        (T4, "bfloat16", 8.1),  # Emulated.
    ],
)
def test_seconds(device, name, rate):
    memory = {"h100": 3350, "t4": 320}["h100" if device is H100 else "t4"]
    found = devices.seconds(device, {name: 1e12}, 10**9)
    assert found == {
        "arithmetic": pytest.approx(1 / rate),
        "memory": pytest.approx(1 / memory),
    }
    assert "memory" not in devices.seconds(device, {name: 1e12}, None)
    unknown = hardware.DeviceDescription("GPU", "B9", (12, 0))
    assert devices.seconds(unknown, {name: 1e12}, 10**9) == {}


@pytest.mark.parametrize(
    ("number", "multiplications", "device", "expected"),
    [
        (1000, 10**9, H100, ["launch_bound"]),  # 25 ms for 0.006 and 10.
        (1000, 3 * 10**12, H100, []),  # For 18 and 10.
        (300, 10**9, H100, []),
        (1000, 10**9, hardware.DeviceDescription("GPU", "B9", (12, 0)), []),
    ],
    ids=["bound", "much arithmetic", "few", "unknown device"],
)
def test_launches_are_reported_where_they_are_the_step(
    number, multiplications, device, expected
):
    layer = layer_facts.LayerFacts(
        "body", "bfloat16", multiplications=multiplications, rows=64
    )
    parts = dict(zip(launches.PARTS, (number - 200, 100, 100), strict=True))
    found = launches.Launches(parts, 0, 0, 0, moved=int(10e-3 * 3350e9))
    for jit_compile in (False, True):
        step = rules.TrainingStep(device, (layer,), 64, jit_compile=jit_compile)
        cost = launch_rules.cost(step, found)
        rows = launch_rules.findings(step, found, cost, True, [])
        # Under XLA there is nothing left to join.
        assert [x.rule for x in rows] == ([] if jit_compile else expected)


def advice(clusters=False, refused=(), **fields):
    """Returns what is advised of a step with launches."""
    step = rules.TrainingStep(H100, (), 64, **fields)
    found = launches.Launches({"forward": 1, "backward": 1, "update": 1}, 0, 0, 0, 1)
    cost = launch_rules.cost(step, found)
    (row,) = launch_rules.findings(step, found, cost, clusters, refused)
    return [x for x in ("jit_compile", "tfamp.enable", "batch") if x in row.advice]


def test_advice_is_what_is_left_to_do():
    assert advice() == ["jit_compile", "tfamp.enable", "batch"]
    assert advice(clusters=True) == ["jit_compile", "batch"]
    assert advice(clusters=True, refused=["CTCLoss"]) == ["batch"]
    assert advice(allows_xla=False) == ["tfamp.enable", "batch"]
