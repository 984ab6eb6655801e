"""What a training step holds, computed from a trace of it: no step is taken."""

import collections
import functools
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp import extras, progress, tables
from tfamp.facts import graph_context
from tfamp.inspect import batches, model_inputs, structure, traces
from tfamp.keras_patches import hooks, keras_optimizers
from tfamp.storage import buffers, xla_buffers

KINDS = (
    *("weights", "gradients", "optimizer", "activations", "inputs", "temporaries"),
)
_WORDS = {"workspaces": "cuDNN's workspaces, up to", "bound": "total with them"}
_MIB = 2**20
# TensorFlow's bound of a workspace, and its default in MB:
# tensorflow/core/kernels/conv_ops_impl.h. A convolution's two gradients may be tried at
# once: with 4,096 an H200 held 5,504 MiB more (results/gpu/report.md).
_LIMIT, _LIMIT_MB = "TF_CUDNN_WORKSPACE_LIMIT_IN_MB", 4096
# Around a workspace and a copy of the result, while algorithms are tried, there are
# 8 MiB on both sides: xla/stream_executor/gpu/redzone_allocator.h.
_REDZONES_MB = 4 * 8


class MemoryReport(NamedTuple):
    """What a training step holds at its peak, in bytes; `print` it.

    Attributes:
      model: The model's name.
      batch_size: Examples in the batch.
      weights: Of the model, trained or not.
      gradients: That the optimizer is given.
      optimizer: What the optimizer keeps.
      activations: Kept for the backward pass, or computed again in it.
      inputs: The batch.
      temporaries: Everything else at the peak. Of a program that XLA compiles: all
        that it holds, gradients and activations included.
      layers: Path of a layer -> its part of `activations`, largest first.
      notes: What was assumed.
      workspaces: Not part of the total. What cuDNN may take besides in the first step,
        on a GPU where there are convolutions; 0 elsewhere. See `memory`.
    """

    model: str
    batch_size: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    inputs: int
    temporaries: int
    layers: dict[str, int]
    notes: tuple[str, ...] = ()
    workspaces: int = 0

    @property
    def total(self) -> int:
        """What the step needs, in bytes: all kinds, without workspaces."""
        return sum(getattr(self, kind) for kind in KINDS)

    @property
    def bound(self) -> int:
        """The total with workspaces, in bytes.

        What products try in the first step is not in it: up to 110 MiB on an H200
        (results/gpu/report.md).
        """
        return self.total + self.workspaces

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        sums = {"total": self.total, "bound": self.bound}
        return {"schema_version": 1, **self._asdict(), **sums}

    def to_text(self) -> str:
        """Returns the tables."""
        title = f"A training step of {self.model!r}, {self.batch_size} examples"
        kinds = (*KINDS, "total") + ("workspaces", "bound") * bool(self.workspaces)
        rows = [[_WORDS.get(kind, kind), _mib(getattr(self, kind))] for kind in kinds]
        parts = [(("at the peak", "MiB"), rows)]
        if shown := [[path, _mib(held)] for path, held in [*self.layers.items()][:10]]:
            parts.append((("activations of", "MiB"), shown))
        return tables.report([title, *self.notes], parts)

    __str__ = to_text

    def figure(self, **others: "MemoryReport") -> Any:
        """Returns a matplotlib figure: bytes by kind, and activations by layer.

        Args:
          **others: Reports whose bytes by kind are drawn below, with their names.
        """
        matplotlib = extras.require("matplotlib")
        Figure = extras.require("matplotlib.figure").Figure
        reports = {self.model: self, **others}
        shown = dict([*self.layers.items()][:20])
        heights = len(reports) + 2, len(shown) + 1
        figure = Figure((9, 2 + 0.25 * sum(heights)), layout="constrained")
        upper, lower = figure.subplots(2, 1, height_ratios=heights)
        ends = [0.0] * len(reports)
        colors = matplotlib.colormaps["viridis"].resampled(len(KINDS))
        for number, kind in enumerate(KINDS):
            sizes = [getattr(each, kind) / _MIB for each in reports.values()]
            style = {"color": colors(number), "edgecolor": "white", "label": kind}
            drawn = upper.barh([*reports], sizes, left=ends, **style)
            ends = [x + y for x, y in zip(ends, sizes, strict=True)]
        upper.bar_label(drawn, [_mib(x.total) for x in reports.values()], padding=3)
        figure.legend(loc="outside upper center", ncols=len(KINDS))
        drawn = lower.barh([*shown], [x / _MIB for x in shown.values()], color="gray")
        lower.bar_label(drawn, map(_mib, shown.values()), padding=3)
        for axes in (upper, lower):
            axes.invert_yaxis()
            axes.margins(x=0.15)
        upper.set_xlabel("MiB at the peak of a training step")
        lower.set_xlabel(f"MiB of activations, {self.model}")
        return figure


def _mib(size):
    return f"{size / _MIB:,.1f}"


def memory(model: keras.Model, batch: Any, *, verbose: int = 1) -> MemoryReport:
    """Computes what a training step of a model holds at its peak, without running it.

    The step is traced as `fit` traces it, with the model's layers as they are assigned
    now: their formats, what is computed again, how weights and slots are stored.
    Programs, and what libraries take for themselves, are not counted.

    Of a model with `jit_compile=True`, XLA compiles the step for this device, which
    takes as long as in `fit`, and tells what it holds. Where it does not compile, the
    report describes the step before XLA, and its notes say why.

    On a GPU, TensorFlow tries cuDNN's algorithms in the first step that has a
    convolution, each with a workspace and a copy of the result, and keeps the fastest.
    What they take is not known before; a workspace takes at most what the variable
    TF_CUDNN_WORKSPACE_LIMIT_IN_MB says (4096 without it), and the two gradients of a
    convolution may be tried at once. XLA does the same when it compiles. An algorithm
    whose workspace cannot be allocated is left out.

    Args:
      model: A built and compiled model; its optimizer is built, if it is not.
      batch: What a dataset for `fit` yields: (x, y) or (x, y, sample weights) of arrays
        or tensors with a leading axis of examples.
      verbose: 1: a line, on standard error, if it takes long; 0: none.

    Returns:
      A `MemoryReport`; `print` shows its tables, `figure` draws them.

    Raises:
      TypeError: If `model` is no Keras model.
      ValueError: If the model is not built or not compiled, or has several replicas.

    Example:
      print(tfamp.memory(model, next(iter(dataset))))

    References:
      `AutotuneConvImpl` in tensorflow/core/kernels/conv_ops_gpu.cc and
      `DnnScratchAllocator` in conv_ops_gpu.h,
      https://github.com/tensorflow/tensorflow/tree/master/tensorflow/core/kernels
    """
    with progress.Progress(verbose, "computing the memory of a step"):
        return predicted(model, batch)[0]


def predicted(
    model: keras.Model, batch: Any
) -> tuple[MemoryReport, dict[keras.layers.Layer, int]]:
    """Returns what `memory` returns, and the activations of each layer itself.

    Args:
      model, batch: As of `memory`.
    """
    structure.check_built(model)
    if not model.compiled or model.optimizer is None:
        raise ValueError(
            "`tfamp.memory` needs a model that was compiled with an optimizer. "
            f"Received: {model.name!r}, compiled: {model.compiled}."
        )
    replicas = model.distribute_strategy.num_replicas_in_sync
    if replicas > 1:
        raise ValueError(
            f"`tfamp.memory` describes one device. Received: a model of {replicas} "
            "replicas. Compile it outside of a strategy, and pass the batch of one "
            "replica."
        )
    model_inputs.check_batch("batch", batch)
    batches.check_parts("batch", model, batch)
    batch = keras.tree.map_structure(tf.convert_to_tensor, batch)
    watched = _Watched(model)
    graph = watched.trace(batch)
    program = buffers.Program(watched.kind_of, graph_context.one_device() == "GPU")
    program.add(graph)
    peak = program.peak()
    own = {owner: size for (kind, owner), size in peak.items() if owner}
    layers = collections.Counter()
    for place in structure.walk(model):
        layers[place.path] += own.get(place.layer, 0)
    held = collections.Counter(
        weights=_bytes_of(model.variables),
        optimizer=_bytes_of(model.optimizer.variables),
        inputs=sum(x.dtype.size * x.shape.num_elements() for x in _flat(batch)),
    )
    if watched.compiled:
        held["temporaries"] = watched.compiled
    else:
        for (kind, _), size in peak.items():
            held[kind] += size
    report = MemoryReport(
        model.name,
        _flat(batch)[0].shape[0],
        *(held[kind] for kind in KINDS),
        layers={path: size for path, size in layers.most_common() if size},
        notes=tuple(_notes(model, program, watched)),
        workspaces=_workspaces(program.convolved),
    )
    return report, own


def _workspaces(convolved):
    """Returns what trying cuDNN's algorithms takes at most."""
    limit = os.environ.get(_LIMIT, "")
    most = int(limit) if limit.isdigit() else _LIMIT_MB
    return 2 * (convolved and convolved + (most + _REDZONES_MB) * _MIB)


def _notes(model, program, watched):
    if watched.compiled:
        yield (
            "XLA's own analysis: gradients and activations are among the temporaries; "
            "those of each layer are from before it fuses operations."
        )
        return
    if program.unknown:
        yield f"Not counted: {program.unknown} tensors of unknown size."
    if program.loops:
        yield "Each loop is counted as one iteration, not as all that it keeps."
    if model.jit_compile:
        yield (
            "An estimate from before XLA fuses operations, up to twice of what it "
            f"holds, or half: {watched.reason}."
        )


def _flat(batch):
    return [x for x in keras.tree.flatten(batch) if x is not None]


def _bytes_of(variables: Iterable[Any]) -> int:
    natives = keras_optimizers.native([*variables])
    return sum(x.dtype.size * x.shape.num_elements() for x in natives)


class _Watched:
    """A trace of a model's training step, and to which layer its operations belong."""

    def __init__(self, model):
        self.model = model
        self.owners: dict[int, keras.layers.Layer] = {}  # By ids of operations.
        self.gradients: set[int] = set()  # ids of tensors.
        self.compiled, self.reason = 0, ""  # What XLA holds, or why that is not known.

    def trace(self, batch):
        model = self.model
        layers = structure.layers(model)
        with hooks.replaced([(model, "train_function", model.train_function)]):
            model.make_train_function(force=True)  # What stands before a first step.
            with traces.unchanged(layers):
                for layer in layers:
                    traces.watch(layer, functools.partial(self._noted, layer))
                step = tf.function(
                    lambda data: model.train_step(data),
                    jit_compile=model.jit_compile,
                    autograph=False,
                )
                with hooks.replaced([(model.optimizer, "apply", self._apply)]):
                    graph = step.get_concrete_function(batch).graph
                    if model.jit_compile:
                        self.compiled, self.reason = xla_buffers.held(step, batch)
                return graph

    def _noted(self, layer, original):
        def call(*args, **kwargs):
            graph = tf.compat.v1.get_default_graph()
            before = len(graph.get_operations())
            returned = original(*args, **kwargs)
            for op in graph.get_operations()[before:]:
                self.owners.setdefault(id(op), layer)
            return returned

        return call

    def _apply(self, grads, *args, **kwargs):
        gradients = tf.nest.flatten([*grads], expand_composites=True)
        self.gradients |= {id(x) for x in gradients}
        return type(self.model.optimizer).apply(
            self.model.optimizer, grads, *args, **kwargs
        )

    def kind_of(self, tensor) -> tuple[str, Any]:
        """Returns the kind of a tensor, and its layer."""
        if id(tensor) in self.gradients:
            return "gradients", None
        owner = self.owners.get(id(tensor.op))
        return "activations" if owner else "temporaries", owner
