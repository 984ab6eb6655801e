import pytest
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from tfamp import hardware
from tfamp.graph_rewrite import graphs as rewrite_graphs
from tfamp.graph_rewrite import switch as graph_rewrite

F32, BF16, F16, F64, I32 = (
    tf.as_dtype(name).as_datatype_enum
    for name in ("float32", "bfloat16", "float16", "float64", "int32")
)
ON = {"auto_mixed_precision_onednn_bfloat16": True}


def graph(*nodes, functions=()):
    made = graph_pb2.GraphDef()
    for node in nodes:
        _fill(made.node.add(), *node)
    for nodes_of_function in functions:
        function = made.library.function.add()
        for node in nodes_of_function:
            _fill(function.node_def.add(), *node)
    return made


def _fill(made, name, op, types, inputs=()):
    made.name, made.op = name, op
    made.input.extend(inputs)
    for key, value in types.items():
        if isinstance(value, list):
            made.attr[key].list.type.extend(value)
        elif isinstance(value, bool):
            made.attr[key].b = value
        else:
            made.attr[key].type = value


def cast(source, dtype, number=0):
    name = f"{source}-{number}-CastTo-AutoMixedPrecision"
    return (name, "Cast", {"SrcT": F32, "DstT": dtype}, [f"{source}:{number}"])


def test_type_attributes_are_counted_by_operation_and_dtype():
    made = graph(
        ("a", "MatMul", {"T": BF16, "transpose_a": False}),
        ("b", "MatMul", {"T": F32}),
        ("c", "FusedBatchNormV3", {"T": BF16, "U": F32}),
        ("d", "While", {"T": [F32, I32, F16, F32]}),
        ("e", "Shape", {"out_type": I32, "_hidden": F32}),
        functions=[[("a", "MatMul", {"T": F32})], [("a", "Tan", {"T": F64})]],
    )
    assert rewrite_graphs.type_counts(made) == {
        "FusedBatchNormV3": {"bfloat16": 1, "float32": 1},
        "MatMul": {"bfloat16": 1, "float32": 2},
        "Tan": {"float64": 1},
        "While": {"float16": 1, "float32": 2},
    }


def test_counts_are_added():
    one = {"MatMul": {"float32": 1}}
    two = {"MatMul": {"bfloat16": 3, "float32": 1}, "Add": {"float64": 1}}
    total = {"Add": {"float64": 1}, "MatMul": {"bfloat16": 3, "float32": 2}}
    assert rewrite_graphs.add_counts([one, two]) == total


def test_conversion_is_counted_as_tensorflow_does():
    inputs = [
        ("x", "_Arg", {"T": F32}),
        ("k", "Const", {"dtype": F32}),
        ("r", "ReadVariableOp", {"dtype": F32}),
        ("old", "VariableV2", {"dtype": F32}),
        ("i", "Identity", {"T": F32}, ["old"]),
        ("loop", "Enter", {"T": F32}, ["i"]),
        ("j", "Identity", {"T": F32}, ["x"]),
    ]
    low = ("c", "Cast", {"SrcT": F32, "DstT": BF16}, ["x"])  # The user's own.
    before = graph(*inputs, low, ("m", "While", {"T": [F32, F32, I32], "U": F32}))
    casts = [cast(name, BF16) for name, op, *_ in inputs if op != "VariableV2"]
    after = graph(
        *inputs, low, *casts, cast("m", F32), ("m", "While", {"T": [BF16] * 2 + [I32]})
    )
    result = rewrite_graphs.compare("f", before, after)
    # Not counted: casts of a constant, a variable, and what only reads a variable.
    assert (result.converted, result.nodes, result.casts) == (2, 9, 2)
    assert result.dtype == "bfloat16"
    assert result.before["While"] == {"float32": 3}
    assert result.after["While"] == {"bfloat16": 2}


def test_calls_compiled_by_xla_are_counted():
    call = ("c", "PartitionedCall", {"_XlaMustCompile": True})
    made = graph(call, ("d", "PartitionedCall", {"_XlaMustCompile": False}))
    assert rewrite_graphs.compare("f", made, made).xla_calls == 1
    assert rewrite_graphs.compare("f", made, made).dtype is None


def test_dumps_are_paired_and_ordered_by_time(tmp_path):
    before = graph(("m", "MatMul", {"T": F32})).SerializeToString()
    after = graph(("m", "MatMul", {"T": F16})).SerializeToString()
    files = {
        "graphdef_preop___inference_b_1_200.pb": before,
        "graphdef_AutoMixedPrecision___inference_b_1_200.pb": after,
        "graphdef_AutoMixedPrecision___inference_b_1_200.pb.txt": b"?",
        "paintbuckets_AutoMixedPrecision___inference_b_1_200.txt": b"?",
        "graphdef_preop___inference_a_1_300.pb": before,
        "graphdef_preop___inference_a_1_100.pb": before,
        "graphdef_preop___inference_half_written_400.pb": before[:-3],
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    found = rewrite_graphs.dumped_graphs(tmp_path.iterdir())
    assert [(g.name, g.converted, g.dtype) for g in found] == [
        ("__inference_a_1", 0, None),
        ("__inference_b_1", 1, "float16"),
        ("__inference_a_1", 0, None),
    ]


@pytest.fixture(scope="module")
def product():
    weights, calls = tf.Variable(tf.ones((8, 8))), tf.Variable(0)

    @tf.function
    def multiply(x):
        calls.assign_add(1)
        with tf.device("CPU:0"):
            return tf.nn.relu(tf.matmul(x, weights) + 1.0)

    multiply.get_concrete_function(tf.TensorSpec((8, 8)))
    return multiply, calls


def test_collector_sees_what_becomes_executable(product):
    multiply, _ = product
    collector, x = rewrite_graphs.Collector(), tf.ones((8, 8))
    collector.start()
    with graph_rewrite.optimized_anew():
        multiply(x)
        collector.flush()
        (seen,) = [g for g in collector.graphs if "MatMul" in g.before]
        assert seen.converted == 0 and seen.before["MatMul"] == {"float32": 1}
        multiply(x)
    collector.stop()
    assert len([g for g in collector.graphs if "MatMul" in g.before]) == 1
    with graph_rewrite.optimized_anew():
        multiply(x)
    collector.flush()
    assert len([g for g in collector.graphs if "MatMul" in g.before]) == 1


@pytest.mark.skipif(
    not hardware._onednn_is_on(), reason="TensorFlow's oneDNN kernels are off"
)
@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, "float32"), (ON, "bfloat16"), ({**ON, "disable_meta_optimizer": True}, None)],
    ids=["off", "on", "no_optimizer"],
)
def test_preview_optimizes_and_executes_nothing(product, options, expected):
    multiply, calls = product
    before = calls.numpy()
    concrete = multiply.get_concrete_function(tf.TensorSpec((8, 8)))
    found = rewrite_graphs.optimize(concrete, {**options, "min_graph_nodes": -1})
    counts = rewrite_graphs.type_counts(found)
    fused = {**counts.get("MatMul", {}), **counts.get("_FusedMatMul", {})}
    assert fused == ({expected: 1} if expected else {"float32": 1})
    assert calls.numpy() == before
