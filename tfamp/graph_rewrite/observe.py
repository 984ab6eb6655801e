"""What TensorFlow's graph rewrite did: seen in its own dumps, counted, with reasons.

TensorFlow is silent about a rewrite that does not take place. It dumps each graph
that the rewrite receives, before and after, to the folder that an environment variable
names; here they are counted as in its log: "Converted N/M nodes to bfloat16".
"""

import collections
import contextlib
import os
import pathlib
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf
from google.protobuf import message

from tfamp.facts import formats, names, switches
from tfamp.graph_rewrite import switch
from tfamp.inspect import traces

_LOG_PATH = switch.PREFIX + "LOG_PATH"
_FLOATS = {
    tf.as_dtype(name).as_datatype_enum: name
    for name in (*formats.LOW, "float32", "float64")
}
_XLA = "XLA compiles it and bypasses the rewrite: use jit_compile=False"

TypeCounts = dict[str, dict[str, int]]
# As it came to the rewrite, and as it left it.
Graphs = list[tuple[tf.compat.v1.GraphDef, tf.compat.v1.GraphDef]]


class GraphRewriteReport(NamedTuple):
    """What the graph rewrite did; `print` it.

    Attributes:
      requested: "bfloat16" or "float16"; None if no rewrite is requested.
      effective: The dtype that was seen in the rewritten graphs; None if nothing was
        converted.
      reason: Why nothing was converted, or another note.
      functions: Number of graphs that came to the rewrite.
      nodes: Their nodes before it; those of graphs in which nothing was converted
        count only if nothing was converted at all.
      converted: Of those, converted to 16 bits, as TensorFlow's log counts them: it
        counts type attributes.
      casts: Casts to 16 bits that were added.
      before: Operation -> dtype -> number of type attributes, before.
      after: The same, after.
      preview: Whether graphs were optimized only, and nothing was executed.
    """

    requested: str | None
    effective: str | None
    reason: str
    functions: int = 0
    nodes: int = 0
    converted: int = 0
    casts: int = 0
    before: TypeCounts = {}
    after: TypeCounts = {}
    preview: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return {"schema_version": 1, **self._asdict()}

    def __str__(self) -> str:
        request = f"{self.requested} rewrite" if self.requested else "no rewrite"
        start = f"{'preview: ' * self.preview}requested {request}, effective: "
        if self.effective is None:
            return f"{start}none, because {self.reason}"
        return (
            f"{start}{self.effective}, {self.converted} of {self.nodes} nodes "
            f"converted, {self.casts} cast{'s' * (self.casts != 1)}"
            + (f" ({self.reason})" if self.reason else "")
        )


# ---- Seeing ----

_lock = threading.RLock()


@contextlib.contextmanager
def observe(fresh: bool = False) -> Iterator[Graphs]:
    """Records the graphs that the rewrite receives meanwhile, in any thread.

    A function that ran before under the same settings is not optimized again, and is
    not seen. One thread observes at a time; another waits.

    Args:
      fresh: Whether functions that this thread calls are optimized once more. Both
        executables stay in memory.

    Yields:
      A list, empty until the block is left; then it has the graphs.
    """
    graphs = []
    with _lock, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        users = os.environ.get(_LOG_PATH)
        anew = switch.optimized_anew() if fresh else contextlib.nullcontext()
        try:
            with switches.environ({_LOG_PATH: folder}), anew:
                yield graphs
        finally:
            graphs.extend(_read_graphs(pathlib.Path(folder)))
            if users:
                shutil.copytree(folder, users, dirs_exist_ok=True)


def _read_graphs(folder):
    read = tf.compat.v1.GraphDef.FromString
    for path in sorted(folder.glob("graphdef_preop_*.pb")):
        after = path.with_name(path.name.replace("preop", "AutoMixedPrecision", 1))
        after = after if after.exists() else path  # Nothing was on the allow list.
        # One that another thread is still writing is left out.
        with contextlib.suppress(message.DecodeError):
            yield read(path.read_bytes()), read(after.read_bytes())


# ---- Counting ----


def _types(node):
    """Returns the names of a node's type attributes in a fixed order, lists flattened.

    None for a type that is no float.
    """
    values = [v for name, v in sorted(node.attr.items()) if not name.startswith("_")]
    return [_FLOATS.get(t) for v in values for t in (v.type, *v.list.type)]


def _type_counts(graphs) -> TypeCounts:
    counts = collections.defaultdict(collections.Counter)
    for graph in graphs:
        for node in traces.all_nodes(graph):
            counts[node.op].update(filter(None, _types(node)))
    return {op: dict(sorted(counts[op].items())) for op in sorted(counts) if counts[op]}


def _converted(before, after):
    """Counts the type attributes that became one of 16 bits, by dtype."""
    old = {node.name: _types(node) for node in before.node}
    changed = collections.Counter()
    for node in after.node:
        pairs = zip(old.get(node.name, ()), _types(node), strict=False)
        changed.update(now for was, now in pairs if was != now and now in formats.LOW)
    return changed


def _is_cast(node):
    added = "AutoMixedPrecision" in node.name
    return added and _FLOATS.get(node.attr["DstT"].type) in formats.LOW


def _calls_xla(graph):
    return any(map(_is_compiled, traces.all_nodes(graph)))


def _is_compiled(node_or_function):
    attr = node_or_function.attr  # Reading what is not there would add it.
    return "_XlaMustCompile" in attr and attr["_XlaMustCompile"].b


# ---- Telling ----


def make_report(graphs: Graphs) -> GraphRewriteReport:
    """Returns the report on what `observe` saw."""
    counts = [_converted(*graph) for graph in graphs]
    converted = sum(counts, collections.Counter())
    done = [graph for graph, count in zip(graphs, counts, strict=True) if count]
    effective = " and ".join(sorted(converted)) or None
    return GraphRewriteReport(
        requested=switch.requested_dtype() or effective,
        effective=effective,
        reason=_reason(graphs, bool(converted)),
        functions=len(graphs),
        nodes=sum(len(before.node) for before, _ in done or graphs),
        converted=converted.total(),
        casts=sum(_is_cast(node) for _, after in done for node in after.node),
        before=_type_counts(before for before, _ in graphs),
        after=_type_counts(after for _, after in graphs),
    )


def _reason(graphs, converted):
    by_xla = any(_calls_xla(before) for before, _ in graphs)
    if converted:
        return "a part is compiled by XLA and not rewritten" if by_xla else ""
    if obstacle := switch.find_obstacle():
        return obstacle
    if not graphs:
        return (
            "the rewrite received no graph: eager execution (run_eagerly=True, or "
            "outside of a tf.function) and XLA (use jit_compile=False) bypass it"
        )
    if by_xla:
        return _XLA
    return "no operation is on the allow list and on a device that the rewrite supports"


# ---- One function ----


def graph_rewrite_report(
    fn: Callable, *args, preview: bool = False, **kwargs
) -> GraphRewriteReport:
    """Reports what the graph rewrite changes in a function.

    It runs the function once and inspects the graph that TensorFlow executed. A
    function that ran before is optimized once more for this. The calling thread then
    follows `enable`, as after `sync_thread`. A preview optimizes the graph without
    running it, so that no variable changes; without a requested rewrite it shows what
    `enable_graph_rewrite` would do. Its counts may differ from an execution's by a node
    or two, and by more in the loops of recurrent layers.

    Args:
      fn: A `tf.function`, a `ConcreteFunction`, or a callable to make one of.
      *args: Arguments of `fn`.
      preview: Whether to optimize only.
      **kwargs: Keyword arguments of `fn`.

    Returns:
      A `GraphRewriteReport`.

    Example:
      print(tfamp.graph_rewrite_report(train_step, x, y))
    """
    if not hasattr(fn, "graph") and not hasattr(fn, "get_concrete_function"):
        fn = tf.function(fn)
    if preview:
        if not hasattr(fn, "graph"):
            fn = fn.get_concrete_function(*args, **kwargs)
        return _preview(fn)
    with observe(fresh=True) as graphs:
        fn(*args, **kwargs)
    return make_report(graphs)


def _preview(concrete):
    before = switch.snapshot()
    needed = "eager.context:context", "grappler.tf_optimizer:OptimizeGraph"
    context, optimize = (names.resolve(f"tensorflow.python.{n}") for n in needed)
    try:
        if not context or not optimize:
            raise ValueError("this release of TensorFlow cannot preview it")
        graph = concrete.graph.as_graph_def()
        if any(map(_is_compiled, (concrete.function_def, *graph.library.function))):
            raise ValueError(f"graphs that XLA compiles have no preview: {_XLA}")
        if before.active is None:
            switch.enable(switch.RewriteConfig.from_keywords("auto", {}))
        with observe() as graphs:  # Of a copy; nothing is executed.
            meta = traces.meta_graph(concrete.graph, graph)
            optimize(context().config, meta, verbose=False)
        report = make_report(graphs)
    except ValueError as error:  # UnsupportedModeError is one.
        report = GraphRewriteReport(switch.requested_dtype(), None, str(error))
    finally:
        switch.restore(before)
    if before.active is None and report.effective:
        report = report._replace(reason="no rewrite is enabled")
    return report._replace(preview=True)
