"""What TensorFlow does with the graph rewrite's options, variables and private names.

Each is there and means what `tfamp.graph_rewrite` takes it for, in the TensorFlow that
is installed.
"""

import json
import os
import pkgutil
import re
import subprocess
import sys

import pytest
import tensorflow as tf

from tfamp.graph_rewrite import observe, switch

VALUES = dict.fromkeys(switch.TOGGLES.values(), (True, False))
VALUES[switch.MIN_NODES] = (-(2**31),)


@pytest.mark.parametrize("name", VALUES)
def test_option_is_taken_shown_and_unset(name):
    options = tf.config.optimizer
    for value in VALUES[name]:
        options.set_experimental_options({name: value})
        assert options.get_experimental_options()[name] == value
    options.set_experimental_options({name: None})
    assert name not in options.get_experimental_options()


@pytest.mark.parametrize("jit_compile", [None, False, True])
def test_function_tells_whether_xla_compiles_it(jit_compile):
    function = tf.function(lambda x: x + 1, jit_compile=jit_compile)
    concrete = function.get_concrete_function(tf.TensorSpec((), tf.float32))
    assert observe._is_compiled(concrete.function_def) is bool(jit_compile)
    outer = tf.function(lambda x: function(x) * 2)
    graph = outer.get_concrete_function(tf.TensorSpec((), tf.float32)).graph
    assert observe._calls_xla(graph.as_graph_def()) is bool(jit_compile)


def test_operations_of_the_lists_are_known():
    for name in ("MatMul", "FusedBatchNormGradV3", *switch.FLOAT32_OPS):
        assert hasattr(tf.raw_ops, name)
    assert not hasattr(tf.raw_ops, "MatMull")


def test_a_preview_without_its_private_names_says_so(monkeypatch):
    owner = pkgutil.resolve_name("tensorflow.python.grappler.tf_optimizer")
    monkeypatch.delattr(owner, "OptimizeGraph")
    report = observe.graph_rewrite_report(
        lambda x: x @ x, tf.ones((4, 4)), preview=True
    )
    assert report.effective is None and report.reason


# ---- TensorFlow's log, and what is told ----

_CHILD = """
import json, sys
import keras, numpy as np, tensorflow as tf
from tfamp.graph_rewrite import observe
tf.config.set_visible_devices([], "GPU")
option = "auto_mixed_precision_onednn_bfloat16"
tf.config.optimizer.set_experimental_options({option: True})
layers, random = keras.layers, np.random.default_rng(0).normal

def tensor(*shape):
    return tf.constant(random(size=shape), tf.float32)

def train(*stack, x, y):
    model = keras.Sequential(stack)
    model.compile("adam", "mse", jit_compile=False)
    with observe.observe() as graphs:
        model.train_on_batch(x, y)
    return observe.make_report(graphs)

weights = tf.Variable(tensor(16, 16))

@tf.function
def branches(x):
    y = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.matmul(x, weights), lambda: -x)
    return tf.while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, z @ weights), (0, y))

report, x = observe.graph_rewrite_report, tensor(8, 16)
cases = {
    "dense": lambda: train(
        layers.Dense(32, "gelu"), layers.Dense(4, "softmax"), x=x, y=tensor(8, 4)
    ),
    "conv": lambda: train(
        layers.Conv2D(8, 3), layers.BatchNormalization(),
        layers.GlobalMaxPooling2D(), x=tensor(4, 8, 8, 3), y=tensor(4, 8),
    ),
    "lstm": lambda: train(layers.LSTM(4), x=tensor(4, 5, 8), y=tensor(4, 4)),
    "branches": lambda: report(branches, x),
    "preview": lambda: report(lambda x: tf.nn.relu(x @ weights), x, preview=True),
    "nothing": lambda: report(lambda x: x + 1, x),
}
for name, case in cases.items():
    sys.stderr.write(f"\\nCASE {name}\\n")
    sys.stderr.flush()
    print(json.dumps({name: case().to_dict()}), flush=True)
"""
_LINE = re.compile(r"Converted (\d+)/(\d+) nodes to bfloat16 precision")


def test_numbers_are_those_of_tensorflows_log():
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0", "TF_ENABLE_ONEDNN_OPTS": "1"}
    child = subprocess.run(
        [sys.executable, "-c", _CHILD],
        capture_output=True,
        text=True,
        env=environ,
        timeout=300,
        check=True,
    )
    reports = {
        k: v for x in child.stdout.split("\n") if x for k, v in json.loads(x).items()
    }
    logs = re.split(r"CASE (\w+)\n", child.stderr)
    logged = dict(zip(logs[1::2], map(_LINE.findall, logs[2::2]), strict=True))
    assert reports.keys() == logged.keys()
    for name, report in reports.items():
        lines = [tuple(map(int, line)) for line in logged[name]]
        expected = tuple(map(sum, zip(*lines, strict=True))) if lines else (0,)
        told = (report["converted"], report["nodes"])
        assert told[: len(expected)] == expected, name
    assert not logged["nothing"]
