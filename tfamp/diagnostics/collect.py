"""Reads plain facts from the trace of a model.

Counted are the products of a forward pass, and the elements that all its other
operations write. The backward pass has about twice the products, in the same dtypes,
so that shares of the forward pass are shares of a training step. Notes tell what is not
counted, or by an assumption: loops of open length, unknown shapes, integers, Python.
"""

import math
from typing import Any

import keras
import tensorflow as tf

from tfamp.diagnostics import (
    cudnn,
    dimensions,
    function_bodies,
    layer_trace,
    model_facts,
    products,
)
from tfamp.precision import model_structure

# Operations that write no new numbers: reads, views, calls, what is known before.
_FREE = function_bodies.CALLS.union(
    (
        *("Const", "ReadVariableOp", "Identity", "IdentityN", "Placeholder", "NoOp"),
        *("Reshape", "Squeeze", "ExpandDims", "StopGradient"),
        *("TensorListReserve", "TensorListFromTensor", "TensorListStack"),
        *("TensorListGetItem", "TensorListSetItem"),
    )
)
_PYTHON = frozenset(("PyFunc", "EagerPyFunc", "PyFuncStateless"))
_VIEWS = frozenset(("Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient"))
_ACTIVATIONS = frozenset(("Softmax", "LogSoftmax", "Sigmoid"))


def collect(
    model: keras.Model, specs: Any, batch_size: int, notes: tuple[str, ...] = ()
) -> model_facts.ModelFacts:
    """Traces a model and returns the facts about it.

    Args:
      model: A built model, compiled or not.
      specs: `tf.TensorSpec`s of known shapes, structured as the model's inputs.
      batch_size: Examples in a batch, as in the specs.
      notes: What was assumed to make the specs.

    Returns:
      A `ModelFacts`.

    Raises:
      ValueError: If the model cannot be traced.
    """
    layers = model_structure.flatten_layers(model)
    reader = _Reader(model, layers, layer_trace.trace(model, layers, specs))
    flat = keras.tree.flatten(specs)
    shapes = [spec.shape for spec in flat if len(spec.shape) > 2]
    images = frozenset(x for s in shapes for x in (s[-1], *s[1:-2][:1]))
    outputs = tuple(reader.outputs())
    compiled = bool(model.compiled)
    optimizer = getattr(model, "optimizer", None)  # No attribute before `compile`.
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return model_facts.ModelFacts(
        name=model.name,
        batch_size=batch_size,
        layers=tuple(reader.layers(batch_size, images, {x.layer for x in outputs})),
        casts=tuple(reader.casts()),
        outputs=outputs,
        compiled=compiled,
        loss_dtype=_loss_dtype(model) if compiled else "",
        scales_loss=scales if optimizer is not None else None,
        runs_eagerly=compiled and bool(model.run_eagerly),
        all_counted=not reader.uncounted,
        notes=(*notes, *reader.uncounted, *reader.notes()),
    )


def layer_paths(model: keras.Model) -> dict[int, str]:
    """Returns id of a layer -> its path, as patterns of overrides match it."""
    paths = {id(model): model_structure.path_of(model)}
    for layer in model_structure.flatten_layers(model):  # Parents first.
        for inner in model_structure.children(layer):
            path = model_structure.path_of(inner, paths[id(layer)])
            paths.setdefault(id(inner), path)
    return paths


class _Reader:
    """Turns a trace into facts."""

    def __init__(self, model, layers, trace: layer_trace.Trace):
        self.model, self.trace, self.all_layers = model, trace, layers
        self.paths = layer_paths(model)
        self.uncounted: list[str] = []
        self.takers = {
            op: taker
            for op, taker in trace.takers.items()
            # Not a cast that ends another layer's call, as normalization does.
            if op in trace.owners
            and taker in model_structure.flatten_layers(trace.owners[op][0])[1:]
        }
        self.own: dict[int, list[tuple[tf.Operation, int]]] = {}
        for op, (layer, repeats) in trace.owners.items():
            self.own.setdefault(id(layer), []).append((op, repeats))
        self.vocabularies = frozenset(
            x.input_dim for x in layers if isinstance(x, keras.layers.Embedding)
        )
        self.heads = {}
        self.cudnn_kernels: dict[int, int] = {}
        for layer in layers:
            self.heads.update(dimensions.heads_inside(layer))
            if cudnn.runs_whole(layer):
                calls = [x.repeats for x in trace.calls if x.layer is layer]
                self.cudnn_kernels[id(layer)] = sum(calls)
                self.cudnn_kernels[id(layer.cell)] = 0

    def notes(self):
        """Yields what is counted by an assumption."""
        for op in self.trace.open_loops:
            inside = [x for g in function_bodies.bodies(op) for x in g.get_operations()]
            if any(map(_is_product, inside)):
                path = self.paths[id(self.trace.owners[op][0])]
                yield f"a loop in {path!r} is counted once: its length is not known"

    def layers(self, batch_size, image_channels, ends):
        """Yields the facts of each layer."""
        for layer in self.all_layers:
            path = self.paths[id(layer)]
            context = dimensions.Context(
                *(path, layer, batch_size, self.vocabularies, image_channels),
                heads=self.heads.get(id(layer), {}),
            )
            yield self._layer(context, self.own.get(id(layer), []), path in ends)

    def _layer(self, context, operations, is_output):
        layer = context.layer
        weights = _own_trainable_weights(layer)
        narrow = [w for w in weights if _name(w.dtype) in model_facts.NARROW]
        others = [(op, n) for op, n in operations if not _is_product(op)]
        return model_facts.LayerFacts(
            path=context.path,
            kind=type(layer).__name__,
            compute_dtype=_name(layer.compute_dtype),
            variable_dtype=_name(layer.variable_dtype),
            narrow_variables=sum(math.prod(w.shape) for w in narrow),
            trains=bool(weights),
            products=tuple(self._products(context, operations)),
            kernels=sum(n for op, n in operations if _is_product(op) or _written(op)),
            elements=sum(n * _written(op) for op, n in others),
            float32_elements=sum(n * _written_float32(op) for op, n in others),
            data_format=getattr(layer, "data_format", None),
            bias_rows=max((_bias_rows(op, weights) for op, _ in operations), default=0),
            is_model=isinstance(layer, keras.Model),
            is_output=is_output,
            ties_output=hasattr(layer, "reverse_dtype"),
            cudnn_kernels=self.cudnn_kernels.get(id(layer)),
        )

    def _products(self, context, operations):
        found = [
            products.read(op, context, n) for op, n in operations if _is_product(op)
        ]
        if None in found:
            self._miss("a product of unknown shape", context)
        if any(map(_is_integer_product, (op for op, _ in operations))):
            self._miss("a product of integers", context)
        if any(op.type in _PYTHON for op, _ in operations):
            self._miss("what a Python function computes", context)
        known = [product for product in found if product is not None]
        return known or self._estimated(context)

    def _miss(self, what, context):
        self.uncounted.append(f"{what} in {context.path!r} is not counted")

    def _estimated(self, context):
        inner = model_structure.flatten_layers(context.layer)
        if any(
            _is_product(op) for each in inner for op, _ in self.own.get(id(each), [])
        ):
            return []
        calls = [call for call in self.trace.calls if call.layer is context.layer]
        return products.estimate(context, sum(x.repeats * x.steps for x in calls))

    def casts(self):
        """Yields the casts of activations between layers."""
        for op, (layer, repeats) in self.trace.owners.items():
            if not _casts_activations(op):
                continue
            taker = self.takers.get(op)
            if taker is None and not isinstance(layer, keras.Model):
                continue  # A layer's own way of computing: normalization, softmax.
            yield model_facts.CastFacts(
                source=self._maker(op.inputs[0].op),
                target=self.paths[id(taker if taker is not None else layer)],
                source_dtype=op.inputs[0].dtype.name,
                target_dtype=op.outputs[0].dtype.name,
                elements=repeats * _size(op.outputs[0]),
            )

    def _maker(self, op):
        """Returns the path of the layer that an operation's result comes from."""
        op = _behind(op, _VIEWS)
        if op.type == "Placeholder":
            return "input"
        if op in self.takers:
            return self.paths[id(self.takers[op])]
        return self.paths[id(self.trace.owners.get(op, (self.model, 1))[0])]

    def outputs(self):
        """Yields the facts of each floating output."""
        for tensor in self.trace.outputs:
            if not tensor.dtype.is_floating:
                continue
            end = _behind(tensor.op, _VIEWS)
            before = _behind(end, _VIEWS | {"Cast"})
            activated = before.type in _ACTIVATIONS
            yield model_facts.OutputFacts(
                layer=self._maker(end),
                dtype=tensor.dtype.name,
                activation=before.type if activated else "",
                activation_dtype=before.outputs[0].dtype.name if activated else "",
            )


def _own_trainable_weights(layer):
    inner = model_structure.flatten_layers(layer)[1:]
    theirs = {id(weight) for each in inner for weight in each.weights}
    return [w for w in layer.trainable_weights if id(w) not in theirs]


def _name(dtype):
    return keras.backend.standardize_dtype(dtype)


def _is_product(op):
    return op.type in products.OPERATIONS and op.inputs[1].dtype.is_floating


def _is_integer_product(op):
    return op.type in products.OPERATIONS and op.inputs[1].dtype.is_integer


def _behind(op, kinds):
    """Follows first inputs back through operations of these types."""
    while op.type in kinds and op.inputs:
        op = op.inputs[0].op
    return op


def _written(op):
    if op.type in _FREE:
        return 0
    return sum(_size(tensor) for tensor in op.outputs if tensor.dtype.is_floating)


def _written_float32(op):
    is_float32 = bool(op.outputs) and op.outputs[0].dtype == tf.float32
    return _written(op) if is_float32 and op.type != "Cast" else 0


def _size(tensor):
    return tensor.shape.num_elements() or 0


def _casts_activations(op):
    if op.type != "Cast":
        return False
    floats = op.inputs[0].dtype.is_floating and op.outputs[0].dtype.is_floating
    source = _behind(op.inputs[0].op, _VIEWS)
    return floats and source.type not in ("ReadVariableOp", "Const")


def _bias_rows(op, weights):
    """Rows that a bias gradient sums in bfloat16; 0 if it is another operation.

    With the channels first TensorFlow 2.21 sums each example's positions rightly, and
    then the examples: measured errors depend on their number alone.
    """
    if op.type != "BiasAdd" or op.outputs[0].dtype != tf.bfloat16:
        return 0
    # oneDNN sums the bias gradient of Conv2D with the convolution's own, in float32;
    # a frozen convolution has none.
    is_convolution = _behind(op.inputs[0].op, {"Identity"}).type == "Conv2D"
    if is_convolution and any(len(weight.shape) > 1 for weight in weights):
        return 0
    if op.get_attr("data_format") == b"NCHW":
        return op.outputs[0].shape[0] or 0
    return _size(op.outputs[0]) // max(1, _size(op.inputs[1]))


def _loss_dtype(model):
    """The compiled losses' dtype, the narrowest of several; "" without one."""
    losses = keras.tree.flatten(model.loss)
    names = {
        _name(loss.dtype) for loss in losses if isinstance(loss, keras.losses.Loss)
    }
    narrow = sorted(names.intersection(model_facts.NARROW))
    return narrow[0] if narrow else ("float32" if losses else "")
