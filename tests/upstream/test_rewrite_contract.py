"""The private names of TensorFlow that the graph rewrite's modules use.

Each is there and means what they read, in the TensorFlow that is installed.
"""

import threading

import pytest
import tensorflow as tf
from google.protobuf import text_format
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import op_def_registry

from tfamp.graph_rewrite import graphs as rewrite_graphs
from tfamp.graph_rewrite import lists as rewrite_lists
from tfamp.graph_rewrite import report as rewrite_report
from tfamp.graph_rewrite import switch as graph_rewrite

TOGGLES = ("auto_mixed_precision", "auto_mixed_precision_onednn_bfloat16")


@pytest.mark.parametrize("name", [*TOGGLES, "auto_mixed_precision_mkl"])
def test_option_is_taken_shown_and_unset(name):
    options = tf.config.optimizer
    for value in (True, False):
        options.set_experimental_options({name: value})
        assert options.get_experimental_options()[name] is value
    options.set_experimental_options({name: None})
    assert name not in options.get_experimental_options()


def test_negative_number_is_taken_and_unset():
    options = tf.config.optimizer
    options.set_experimental_options({"min_graph_nodes": -(2**31)})
    assert options.get_experimental_options()["min_graph_nodes"] == -(2**31)
    options.set_experimental_options({"min_graph_nodes": None})
    assert "min_graph_nodes" not in options.get_experimental_options()


def test_thread_keeps_the_options_of_its_first_call():
    tf.function(lambda x: x + 1)(tf.constant(1))
    held = context.context()._thread_local_data.function_call_options
    config = config_pb2.ConfigProto.FromString(held.config_proto_serialized)
    now = context.context().config.graph_options.rewrite_options
    assert config.graph_options.rewrite_options == now
    tf.config.optimizer.set_experimental_options({})
    assert context.context()._thread_local_data.function_call_options is None


def test_new_thread_holds_no_options():
    held = []

    def look():
        held.append(context.context()._thread_local_data.function_call_options)
        held.append(graph_rewrite.thread_is_stale())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert held == [None, False]


def test_graphs_are_collected_with_their_stages():
    ctx = context.context()
    ctx.enable_graph_collection()
    try:
        tf.function(lambda x: tf.matmul(x, x) + 1)(tf.ones((3, 3)))
        metadata = ctx.export_run_metadata()
    finally:
        ctx.disable_graph_collection()
    graphs = [
        each
        for each in metadata.function_graphs
        if any(node.op == "MatMul" for node in each.pre_optimization_graph.node)
    ]
    assert len(graphs) == 1
    assert len(graphs[0].post_optimization_graph.node) > 0
    assert not ctx.export_run_metadata().function_graphs


@pytest.mark.parametrize("jit_compile", [None, False, True])
def test_function_tells_whether_xla_compiles_it(jit_compile):
    function = tf.function(lambda x: x + 1, jit_compile=jit_compile)
    concrete = function.get_concrete_function(tf.TensorSpec((), tf.float32))
    assert function._jit_compile is jit_compile
    assert rewrite_report._is_compiled(function) is bool(jit_compile)
    assert rewrite_report._is_compiled(concrete) is bool(jit_compile)
    outer = tf.function(lambda x: function(x) * 2)
    graph = outer.get_concrete_function(tf.TensorSpec((), tf.float32)).graph
    assert rewrite_graphs.xla_calls(graph.as_graph_def()) == int(bool(jit_compile))


def test_operation_registry_knows_private_operations_too():
    assert op_def_registry.get("MatMul").name == "MatMul"
    assert op_def_registry.get("_FusedBatchNormEx") is not None
    assert op_def_registry.get("MatMull") is None
    assert rewrite_lists.is_operation("MatMul")


def test_options_become_a_session_configuration():
    config = rewrite_graphs._session_config(
        {
            "auto_mixed_precision": True,
            "remapping": False,
            "disable_model_pruning": True,
            "min_graph_nodes": -1,
            "layout_optimizer": None,
        }
    )
    expected = rewriter_config_pb2.RewriterConfig()
    text_format.Parse(
        "auto_mixed_precision: ON remapping: OFF disable_model_pruning: true "
        "min_graph_nodes: -1",
        expected,
    )
    assert config.graph_options.rewrite_options == expected
