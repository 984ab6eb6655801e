"""What became of graphs under TensorFlow's graph rewrite: counted, with reasons.

TensorFlow is silent about a rewrite that does not take place. What is told here was
seen: in TensorFlow's own dumps of each graph before and after the rewrite, and in the
graphs that it made executable.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.graph_rewrite import graphs as rewrite_graphs
from tfamp.graph_rewrite import record as rewrite_record
from tfamp.graph_rewrite import switch as graph_rewrite

_XLA = (
    "XLA compiles it (jit_compile=True), and such functions bypass TensorFlow's graph "
    "optimizers: use jit_compile=False"
)
# Never worth a word in a list of operations.
_PLUMBING = {"Const", "Identity", "Placeholder", "ReadVariableOp", "_Arg", "_Retval"}


class GraphRewriteReport(NamedTuple):
    """What the graph rewrite did; `print` it.

    Attributes:
      requested: "bfloat16" or "float16"; None if no rewrite is asked for.
      effective: The dtype that was seen in the rewritten graphs; None if nothing was
        converted.
      reason: Why nothing was converted, or what else there is to know.
      functions: Number of graphs that came to TensorFlow's optimizers.
      nodes: Their nodes before the rewrite; those of graphs in which nothing was
        converted count only if nothing was converted at all.
      converted: Of those, converted to 16 bits, as TensorFlow's log counts them: it
        counts type attributes.
      casts: Casts to 16 bits added, those of constants and variables left out.
      before: Operation -> dtype -> number of type attributes, before.
      after: The same, after.
      preview: Whether graphs were optimized only, and nothing was executed.
      lower_bound: Whether a real GPU's numbers are higher: this TensorFlow has no
        kernels for GPUs, without which some operations are not converted.
    """

    requested: str | None
    effective: str | None
    reason: str
    functions: int
    nodes: int
    converted: int
    casts: int
    before: rewrite_graphs.TypeCounts
    after: rewrite_graphs.TypeCounts
    preview: bool = False
    lower_bound: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return {"schema_version": 1, **self._asdict()}

    def to_markdown(self) -> str:
        """Returns the sentence and a table of the operations that changed."""
        rows = [
            f"| {op} | {_counts(self.before.get(op))} | {_counts(self.after.get(op))} |"
            for op in sorted(self.before.keys() | self.after.keys())
            if self.before.get(op) != self.after.get(op)
        ]
        table = ["", "| operation | before | after |", "|---|---|---|", *rows]
        return "\n".join([str(self), *(table if rows else [])])

    def __str__(self) -> str:
        asked = f"{self.requested} rewrite" if self.requested else "no rewrite"
        start = f"{'preview: ' if self.preview else ''}requested {asked}, effective: "
        if self.effective is None:
            return f"{start}none, because {self.reason}"
        bound = "at least " if self.lower_bound else ""
        numbers = (
            f"{bound}{self.converted} of {self.nodes} nodes converted, "
            f"{self.casts} cast{'' if self.casts == 1 else 's'}"
        )
        more = f" ({self.reason})" if self.reason else ""
        return f"{start}{self.effective}, {numbers}{more}"


def _counts(types):
    return ", ".join(f"{n} {dtype}" for dtype, n in (types or {}).items()) or "-"


# ---- Observing ----


class Observation:
    """What is seen while `observe` is open; `report` tells it afterwards."""

    def __init__(self):
        self._requested = graph_rewrite.requested_dtype()
        self._stale = graph_rewrite.thread_is_stale()
        self._eager = tf.config.functions_run_eagerly()
        self._finished = False
        self._dumped: rewrite_record.Graphs = []
        self._collected: rewrite_record.Graphs = []
        self._obstacles: list[str] = []

    def finish(self, dumped, collected) -> None:
        """Takes what was seen; called when `observe` closes."""
        self._finished, self._dumped, self._collected = True, dumped, collected
        self._requested = graph_rewrite.requested_dtype() or self._requested
        if self._requested:
            self._obstacles = graph_rewrite.find_obstacles(self._requested)

    def report(self, hints: Sequence[str] = ()) -> GraphRewriteReport:
        """Returns what was seen.

        Args:
          hints: Reasons that the caller knows why nothing might be converted, such as
            a model's `jit_compile=True`; told first where nothing was.

        Returns:
          A `GraphRewriteReport`.

        Raises:
          RuntimeError: If `observe` is still open.
        """
        if not self._finished:
            raise RuntimeError(
                "An observation reports after its block. Call `report` outside of "
                "`with observe()`."
            )
        graphs = self._best()
        if any(graph.converted for graph in graphs):
            return _make_report(self._requested, graphs, _partly(graphs))
        if self._requested:
            return _make_report(
                self._requested, graphs, "; ".join(self._reasons(hints))
            )
        return _make_report(None, graphs, _not_requested(hints))

    def _best(self):
        """The dumps have TensorFlow's numbers; without room for them, the next best."""
        for graphs in (self._dumped, self._collected):
            if any(graph.converted for graph in graphs):
                return graphs
        return self._dumped or self._collected

    def _reasons(self, hints):
        reasons = [hint.rstrip(".") for hint in hints]
        if self._eager:
            reasons.append(
                "functions run eagerly (tf.config.run_functions_eagerly), and only "
                "graphs are rewritten"
            )
        if self._stale:
            reasons.append(
                "the calling thread still holds the options from before: call "
                "tfamp.sync_thread() in it, or enable before it first calls a function"
            )
        reasons += [line.rstrip(".") for line in self._obstacles]
        by_xla = any(graph.xla_calls for graph in [*self._dumped, *self._collected])
        if by_xla and not any("XLA" in hint for hint in hints):
            reasons.append(_XLA)
        return reasons or [self._last_reason()]

    def _last_reason(self):
        if not self._dumped and not self._collected:
            return (
                "no graph was optimized meanwhile: functions that ran before under the "
                "same settings are kept as they are (observe(fresh=True) has them "
                "optimized again), and code outside of a tf.function, or compiled by "
                "XLA, has no such graph"
            )
        if not self._dumped:
            return (
                "TensorFlow did not pass the graphs on to the rewrite (its log tells "
                "more with TF_CPP_MIN_LOG_LEVEL=0)"
            )
        return _nothing_allowed(self._dumped)


def _partly(graphs):
    calls = sum(graph.xla_calls for graph in graphs)
    if not calls:
        return ""
    some = "1 call in it is" if calls == 1 else f"{calls} calls in it are"
    return f"{some} compiled by XLA and not rewritten"


def _nothing_allowed(graphs):
    operations = {op for graph in graphs for op in graph.before} - _PLUMBING
    few = ", ".join(sorted(operations)[:5]) + (", ..." if len(operations) > 5 else "")
    return (
        f"none of the operations ({few or 'none with floats'}) is both on the allow "
        "list and on a device that the rewrite is for"
    )


def _not_requested(hints):
    reasons = ["no graph rewrite is enabled (tfamp.enable(..., graph_rewrite=True))"]
    try:
        if graph_rewrite.requested_by_environment():
            reasons = [
                "TensorFlow 2 does not read the environment flags that ask for it, "
                "and " + reasons[0]
            ]
    except ValueError as error:
        reasons.append(str(error).rstrip("."))
    return "; ".join([*reasons, *(hint.rstrip(".") for hint in hints)])


def _make_report(requested, graphs, reason, preview=False, lower_bound=False):
    done = [graph for graph in graphs if graph.converted]
    counted = done or graphs
    effective = " and ".join(sorted({graph.dtype for graph in done})) or None
    return GraphRewriteReport(
        requested or effective,
        effective,
        reason,
        len(graphs),
        sum(graph.nodes for graph in counted),
        sum(graph.converted for graph in done),
        sum(graph.casts for graph in done),
        rewrite_graphs.add_counts(graph.before for graph in graphs),
        rewrite_graphs.add_counts(graph.after for graph in graphs),
        preview,
        lower_bound,
    )


@contextlib.contextmanager
def observe(fresh: bool = False) -> Iterator[Observation]:
    """Meanwhile, sees which graphs TensorFlow optimizes, in any thread.

    A function that ran before under the same settings is not optimized again, and is
    not seen. What `tf.summary.trace_on` collects is lost.

    Args:
      fresh: Whether functions that this thread calls are optimized once more. Both
        executables stay in memory.

    Yields:
      An `Observation`, whose `report` tells what was seen when the block is left.

    Example:
      with rewrite_report.observe() as observation:
          model.train_on_batch(x, y)
      print(observation.report())
    """
    observation = Observation()
    found = rewrite_record.RECORDER.open()
    try:
        with _optimized_anew() if fresh else contextlib.nullcontext():
            yield observation
    finally:
        observation.finish(*rewrite_record.RECORDER.close(found))


@contextlib.contextmanager
def _optimized_anew():
    if graph_rewrite.thread_is_stale():
        yield  # Setting an option would bring the thread up to date, unasked.
        return
    with graph_rewrite.optimized_anew():
        yield


# ---- One function ----


def graph_rewrite_report(
    fn: Callable,
    *args,
    preview: bool = False,
    simulate_gpu: bool = False,
    **kwargs,
) -> GraphRewriteReport:
    """Shows what the graph rewrite makes of a function.

    Runs it once and looks at the graph that TensorFlow executed; a function that ran
    before is optimized once more for it. A preview optimizes the graph and runs
    nothing, so that no variable changes; it shows what `enable` would do if no rewrite
    is asked for. Its numbers may differ from an execution's, by a node or two, by more
    in the loops of recurrent layers.

    Args:
      fn: A `tf.function`, a `ConcreteFunction`, or a callable to make one of.
      *args: Arguments of `fn`.
      preview: Whether to optimize only.
      simulate_gpu: Whether to preview the float16 rewrite for a GPU of capability 8.0,
        which this host need not have.
      **kwargs: Keyword arguments of `fn`.

    Returns:
      A `GraphRewriteReport`.

    Example:
      print(tfamp.graph_rewrite_report(train_step, x, y))
    """
    if not hasattr(fn, "graph") and not hasattr(fn, "get_concrete_function"):
        fn = tf.function(fn)
    if preview or simulate_gpu:
        return _preview(_concrete(fn, args, kwargs), simulate_gpu)
    with observe(fresh=True) as observation:
        fn(*args, **kwargs)
    return observation.report([_XLA] if _is_compiled(fn) else [])


def _concrete(fn, args, kwargs):
    if hasattr(fn, "graph"):
        return fn
    return fn.get_concrete_function(*args, **kwargs)


def _is_compiled(fn):
    if getattr(fn, "_jit_compile", False):  # TensorFlow 2.21, of a tf.function.
        return True
    attributes = getattr(getattr(fn, "function_def", None), "attr", {})
    return "_XlaMustCompile" in attributes and attributes["_XlaMustCompile"].b


def _preview(concrete, simulate_gpu):
    try:
        dtype, plan = _plan(simulate_gpu)
    except ValueError as error:  # UnsupportedModeError is one.
        graphs = [rewrite_graphs.compare("", *2 * (concrete.graph.as_graph_def(),))]
        asked = "float16" if simulate_gpu else graph_rewrite.requested_dtype()
        return _make_report(asked, graphs, str(error).rstrip("."), preview=True)
    graphs = _optimized(concrete, plan, simulate_gpu)
    notes = ["for a GPU that is simulated"] if simulate_gpu else []
    if graph_rewrite.requested_dtype() is None:
        notes.append("no rewrite is enabled")
    partly = _partly(graphs)
    compiled = _is_compiled(concrete)
    if partly:
        notes.append(partly)
    if compiled or not any(graph.converted for graph in graphs):
        graphs = [
            graph._replace(converted=0, casts=0, after=graph.before) for graph in graphs
        ]
        by_xla = compiled or bool(partly)
        notes = [_XLA if by_xla else _nothing_allowed(graphs)]
    bound = simulate_gpu and not tf.test.is_built_with_gpu_support()
    if bound and not compiled:
        notes.append("this TensorFlow has no kernels for GPUs")
    return _make_report(dtype, graphs, "; ".join(notes), True, bound)


def _plan(simulate_gpu):
    now = graph_rewrite.active()
    config = now.config if now else graph_rewrite.RewriteConfig()
    if not simulate_gpu:
        plan = graph_rewrite.make_plan(config)
        return plan.dtype, plan
    plan = graph_rewrite.make_plan(
        dataclasses.replace(config, dtype="float16"), [graph_rewrite.SIMULATED_GPU]
    )
    return "float16", plan


def _optimized(concrete, plan, simulate_gpu):
    found = rewrite_record.RECORDER.open()
    try:
        with graph_rewrite.previewing(plan, simulate_gpu) as options:
            rewrite_graphs.optimize(concrete, options)
    finally:
        dumped, _ = rewrite_record.RECORDER.close(found)
    compiled = rewrite_graphs.xla_functions(concrete.graph.as_graph_def())
    return [graph for graph in dumped if graph.name not in compiled]
