"""What the export reads in a SavedModel's graph, and its measure of difference."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

import tfamp
from tfamp.serving import export_report, saved_graph

FLOAT32 = tfamp.float_format("float32")


class Low(tf.Module):
    """Computes in bfloat16 two functions deep, behind a condition."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    @tf.function
    def inner(self, x):
        return tf.cast(tf.cast(x, self.dtype) * 2, tf.float32)

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.float32)])
    def outer(self, x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: self.inner(x), lambda: x)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64"])
def test_low_precision_is_found_in_nested_functions(name, tmp_path):
    module = Low(tf.as_dtype(name))
    tf.saved_model.save(module, str(tmp_path), signatures=module.outer)
    graph = saved_graph.read(tmp_path)
    found = [line for line in graph.low_precision if line.startswith("Mul ")]
    if name == "float64":
        assert not graph.low_precision
    else:
        assert found and all("inner" in line and name in line for line in found)


def edit_constant(meta):
    node = meta.graph_def.node.add(name="c", op="Const")
    node.attr["value"].tensor.dtype = tf.float16.as_datatype_enum


def edit_list(meta):
    node = meta.graph_def.node.add(name="c", op="IdentityN")
    node.attr["T"].list.type.append(tf.bfloat16.as_datatype_enum)


def edit_nested_attribute(meta):
    node = meta.graph_def.node.add(name="c", op="PartitionedCall")
    inner = node.attr["f"].func.attr["T"]
    inner.type = tf.float16.as_datatype_enum


def edit_reference(meta):
    node = meta.graph_def.node.add(name="c", op="VariableV2")
    node.attr["T"].type = tf.float16.as_datatype_enum + 100


def edit_argument(meta):
    function = meta.graph_def.library.function.add()
    function.signature.name = "c"
    function.signature.output_arg.add(type=tf.bfloat16.as_datatype_enum)


def edit_variable(meta):
    node = meta.object_graph_def.nodes.add()
    node.variable.name = "c"
    node.variable.dtype = tf.float16.as_datatype_enum


@pytest.mark.parametrize(
    "edit",
    [
        edit_argument,
        edit_constant,
        edit_list,
        edit_nested_attribute,
        edit_reference,
        edit_variable,
    ],
)
def test_low_precision_is_found_wherever_it_is_written(edit, tmp_path):
    saved = saved_model_pb2.SavedModel()
    meta = saved.meta_graphs.add()
    meta.signature_def["serving_default"].SetInParent()
    path = tmp_path / "saved_model.pb"
    path.write_bytes(saved.SerializeToString())
    assert saved_graph.read(tmp_path).low_precision == ()
    edit(meta)
    path.write_bytes(saved.SerializeToString())
    (line,) = saved_graph.read(tmp_path).low_precision
    assert "'c'" in line and "float16" in line


def test_missing_signature_is_named(tmp_path):
    tf.saved_model.save(tf.Module(), str(tmp_path))
    with pytest.raises(KeyError, match="no signature 'serving_default'"):
        saved_graph.read(tmp_path)


NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("actual", "expected", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.0], (0, 0)),
        ([1.0, 2.5], [1.0, -2.0], (4.5 / 2, 4.5)),
        ([0.0], [0.0], (0, 0)),
        ([FLOAT32.smallest_normal], [0.0], (1, FLOAT32.smallest_normal)),
        ([NAN, INF, 1.0], [NAN, INF, 2.0], (0.5, 1)),
        ([NAN], [1.0], (INF, INF)),
        ([-INF], [INF], (INF, INF)),
        ([1.0], [INF], (INF, INF)),
        ([], [], (0, 0)),
        ([True, False], [True, True], (1, 1)),
        (["a"], ["a"], (0, 0)),
        (["a"], ["b"], (INF, INF)),
        ([1.0], [[1.0]], (INF, INF)),
    ],
)
def test_difference(actual, expected, difference):
    assert export_report.difference({"y": actual}, {"y": expected}) == difference


def test_difference_is_the_worst_output_and_infinite_if_one_is_missing():
    a, b = {"x": [1.0], "y": [2.0]}, {"x": [1.0], "y": [4.0]}
    assert export_report.difference(a, b) == (0.5, 2.0)
    assert export_report.difference(a, {"x": [1.0]}) == (INF, INF)
