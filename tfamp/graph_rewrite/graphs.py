"""Graphs before and after TensorFlow's graph rewrite: read, counted, previewed.

TensorFlow logs "Converted N/M nodes to bfloat16 precision using K cast(s)". Here the
same three numbers are counted in the graphs that it dumps before and after: N is not
of nodes but of type attributes, M is of the nodes before, and K is of the casts to
16 bits whose source is no constant and no variable.
"""

import pathlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf
from google.protobuf import message
from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context  # TensorFlow 2.21
from tensorflow.python.grappler import tf_optimizer  # TensorFlow 2.21

FLOATS = {
    tf.as_dtype(name).as_datatype_enum: name
    for name in ("float16", "bfloat16", "float32", "float64")
}
LOW = ("float16", "bfloat16")
_BEFORE, _AFTER = "graphdef_preop_", "graphdef_AutoMixedPrecision_"
_ADDED = "AutoMixedPrecision"  # In the name of each cast that the rewrite adds.
_VARIABLES = {
    "Variable",
    "VariableV2",
    "AutoReloadVariable",
    "VarHandleOp",
    "ReadVariableOp",
    "_VarHandlesOp",
    "_ReadVariablesOp",
}

TypeCounts = dict[str, dict[str, int]]


class RewrittenGraph(NamedTuple):
    """One graph that came to the rewrite.

    Attributes:
      name: The function's name.
      nodes: Number of nodes before (M).
      dtype: What type attributes became: "bfloat16" or "float16"; None if none did.
      converted: Number of type attributes that became 16 bits (N).
      casts: Number of casts to 16 bits added, those of constants and variables left
        out (K).
      before: Operation -> dtype -> number of type attributes, before.
      after: The same, after.
      xla_calls: Number of calls in it that XLA compiles, which no rewrite reaches.
    """

    name: str
    nodes: int
    dtype: str | None
    converted: int
    casts: int
    before: TypeCounts
    after: TypeCounts
    xla_calls: int


# ---- Counting ----


def type_counts(graph: graph_pb2.GraphDef) -> TypeCounts:
    """Counts floating type attributes, those of the library's functions too.

    Args:
      graph: A `GraphDef`.

    Returns:
      Dict from operation to a dict from dtype name to a number; both sorted. Only the
      dtypes of `FLOATS` count.
    """
    counts: dict[str, Counter] = {}
    for node in _all_nodes(graph):
        for types in _types(node).values():
            names = [FLOATS[kind] for kind in types if kind in FLOATS]
            if names:
                counts.setdefault(node.op, Counter()).update(names)
    return {op: dict(sorted(counts[op].items())) for op in sorted(counts)}


def add_counts(counts: Iterable[TypeCounts]) -> TypeCounts:
    """Returns the sum of several `type_counts`."""
    total: dict[str, Counter] = {}
    for each in counts:
        for op, types in each.items():
            total.setdefault(op, Counter()).update(types)
    return {op: dict(sorted(total[op].items())) for op in sorted(total)}


def compare(
    name: str, before: graph_pb2.GraphDef, after: graph_pb2.GraphDef
) -> RewrittenGraph:
    """Counts what a rewrite did to a graph.

    Args:
      name: The graph's name.
      before: The graph that came to the rewrite.
      after: The graph that it left.

    Returns:
      A `RewrittenGraph`.
    """
    old = {node.name: node for node in before.node}
    changed = Counter()
    for node in after.node:
        if node.name in old:
            changed.update(_lowered(old[node.name], node))
    return RewrittenGraph(
        name,
        len(before.node),
        next((dtype for dtype, _ in changed.most_common(1)), None),
        changed.total(),
        sum(_is_counted_cast(node, old) for node in after.node),
        type_counts(before),
        type_counts(after),
        xla_calls(before),
    )


def xla_calls(graph: graph_pb2.GraphDef) -> int:
    """Returns the number of calls in a graph that XLA must compile."""
    return sum(node.attr["_XlaMustCompile"].b for node in _all_nodes(graph))


def xla_functions(graph: graph_pb2.GraphDef) -> set[str]:
    """Returns the names of the functions in a graph that XLA must compile."""
    return {
        function.signature.name
        for function in graph.library.function
        if function.attr["_XlaMustCompile"].b
    }


def _all_nodes(graph) -> Iterator:
    yield from graph.node
    for function in graph.library.function:
        yield from function.node_def


def _types(node):
    """Returns name of a type attribute -> its types as a list of TensorFlow's enum."""
    found = {}
    for name, value in node.attr.items():
        kind = value.WhichOneof("value")
        if name.startswith("_"):
            continue
        if kind == "type":
            found[name] = [value.type]
        elif kind == "list" and value.list.type:
            found[name] = list(value.list.type)
    return found


def _lowered(old, new):
    """Yields the dtype of each type attribute that became one of 16 bits."""
    old_types = _types(old)
    for name, types in _types(new).items():
        before = old_types.get(name, [None] * len(types))
        for was, now in zip(before, types, strict=False):
            if was != now and FLOATS.get(now) in LOW:
                yield FLOATS[now]


def _is_counted_cast(node, old):
    added = node.op == "Cast" and node.name not in old and _ADDED in node.name
    if not added or FLOATS.get(node.attr["DstT"].type) not in LOW:
        return False
    source = old.get(_producer(node.input[0]))
    return source is None or not _is_constant_or_variable(source, old)


def _producer(name):
    return name.removeprefix("^").split(":")[0]


def _is_constant_or_variable(node, nodes):
    # As TensorFlow's IsConstant, IsVariable, NodeImplicitlyReadsNonResourceVariable.
    if node.op == "Const" or node.op in _VARIABLES:
        return True
    if node.op not in ("Identity", "Enter") or not node.input:
        return False
    source = nodes.get(_producer(node.input[0]))
    if source is None:
        return False
    if node.op == "Identity":
        return source.op in ("Variable", "VariableV2")
    return source.op == "Identity" and _is_constant_or_variable(source, nodes)


# ---- Graphs that TensorFlow dumps ----


def dumped_graphs(files: Iterable[pathlib.Path]) -> list[RewrittenGraph]:
    """Reads TensorFlow's dumps: those that it writes for each graph to be rewritten.

    Args:
      files: Files of a folder that stood in the environment variable
        TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_LOG_PATH.

    Returns:
      A `RewrittenGraph` for each graph, in the order of their times. One without
      anything on the allow list has no dump from after, and is unchanged.
    """
    paths = {path.name: path for path in files if path.name.endswith(".pb")}
    found = []
    for name in sorted(paths, key=lambda name: (name.rpartition("_")[2], name)):
        if not name.startswith(_BEFORE):
            continue
        rest = name.removeprefix(_BEFORE)
        before = _read(paths[name])
        after = _read(paths[_AFTER + rest]) if _AFTER + rest in paths else before
        if before is None or after is None:
            continue
        found.append(
            compare(rest.removesuffix(".pb").rpartition("_")[0], before, after)
        )
    return found


def _read(path):
    try:
        return graph_pb2.GraphDef.FromString(path.read_bytes())
    except message.DecodeError:
        return None  # Another thread's, still being written.


# ---- Graphs that TensorFlow executes ----


class Collector:
    """Collects each graph that any thread makes executable while it is started.

    TensorFlow makes one of each function under each set of options, once, and keeps
    it. A function compiled by XLA by itself is not among them.
    """

    def __init__(self):
        self.graphs: list[RewrittenGraph] = []

    # TensorFlow 2.21; guarded by tests/test_rewrite_contract.py.
    def start(self) -> None:
        """Starts collecting."""
        context.context().enable_graph_collection()

    def flush(self) -> None:
        """Moves what was collected so far to `graphs`."""
        metadata = context.context().export_run_metadata()
        for each in metadata.function_graphs if metadata else ():
            before = each.pre_optimization_graph
            self.graphs.append(compare("", before, each.post_optimization_graph))

    def stop(self) -> None:
        """Collects no more."""
        self.flush()
        context.context().disable_graph_collection()


# ---- Preview ----


def optimize(concrete: Any, options: Mapping[str, Any]) -> graph_pb2.GraphDef:
    """Optimizes a copy of a function's graph; nothing is executed.

    Args:
      concrete: A `ConcreteFunction`.
      options: Options as of `tf.config.optimizer.set_experimental_options`.

    Returns:
      The optimized `GraphDef`. TensorFlow's dumps and log are as for an execution.
    """
    graph = concrete.graph
    meta = tf.compat.v1.train.export_meta_graph(
        graph_def=graph.as_graph_def(), graph=graph
    )
    compiled = xla_functions(meta.graph_def)
    for function in meta.graph_def.library.function:
        if function.signature.name in compiled:
            # Else it is inlined here, where an execution leaves it to XLA.
            function.attr["_noinline"].b = True
    for name in list(meta.collection_def):
        del meta.collection_def[name]  # Of variables, whose initializers are elsewhere.
    fetches = meta.collection_def["train_op"].node_list.value
    fetches.extend(tensor.name for tensor in graph.outputs)
    fetches.extend(operation.name for operation in graph.control_outputs)
    return tf_optimizer.OptimizeGraph(_session_config(options), meta, verbose=False)


def _session_config(options):
    config = config_pb2.ConfigProto()
    rewrite = config.graph_options.rewrite_options
    fields = rewriter_config_pb2.RewriterConfig.DESCRIPTOR.fields_by_name
    for name, value in options.items():
        if value is None:
            continue
        if fields[name].enum_type:
            value = rewrite.ON if value else rewrite.OFF
        setattr(rewrite, name, value)
    return config
