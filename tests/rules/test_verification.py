"""What the export reads in a SavedModel's graph, and how outputs differ."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

import tfamp
from tfamp.serving import report

TINY = tfamp.float_format("float32").smallest_normal
HALF, BFLOAT16 = tf.float16.as_datatype_enum, tf.bfloat16.as_datatype_enum


def node(meta, op):
    return meta.graph_def.node.add(name="c", op=op).attr


def named(message):
    message.name = "c"
    return message


# Function of a meta graph that returns the message to put the dtype in, and its field.
PLACES = {
    "constant": lambda meta: (node(meta, "Const")["value"].tensor, "dtype", HALF),
    "list": lambda meta: (node(meta, "IdentityN")["T"].list, "type", [BFLOAT16]),
    "nested": lambda meta: (node(meta, "Call")["f"].func.attr["T"], "type", HALF),
    "reference": lambda meta: (node(meta, "VariableV2")["T"], "type", HALF + 100),
    "argument": lambda meta: (
        named(meta.graph_def.library.function.add().signature).output_arg.add(),
        "type",
        BFLOAT16,
    ),
    "variable": lambda meta: (
        named(meta.object_graph_def.nodes.add().variable),
        "dtype",
        HALF,
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_low_precision_is_found_wherever_it_is_written(place, tmp_path):
    saved = saved_model_pb2.SavedModel()
    message, field, dtype = PLACES[place](saved.meta_graphs.add())

    if isinstance(dtype, list):
        getattr(message, field).extend(dtype)
    else:
        setattr(message, field, dtype)
    (tmp_path / "saved_model.pb").write_bytes(saved.SerializeToString())
    (line,) = report.read_graph(tmp_path).low
    assert "'c'" in line and "float16" in line


NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("actual", "expected", "absolute", "relative"),
    [
        ([3.0, 2.0], [3.0, -4.0], 6.0, 6 / 5),
        ([0.0], [0.0], 0, 0),
        ([TINY], [0.0], TINY, 1),
        ([NAN, INF, 1.0], [NAN, INF, 2.0], 1, 0.5),
        ([NAN], [1.0], INF, INF),
        ([-INF], [INF], INF, INF),
        ([1.0], [INF], INF, INF),
        ([], [], 0, 0),
        ([True, False], [True, True], 1, 0.5),
        (["a"], ["a"], 0, 0),
        (["a"], ["b"], INF, 1),
    ],
)
def test_errors_of_outputs(actual, expected, absolute, relative):
    (row,) = report.compare({"y": actual}, {"y": expected})
    assert row == ("y", absolute, relative)
