"""Plain facts about the layers of a built model, for the rules of an audit to read.

The model is traced once, forward with `training=True`, and the calls of its layers are
watched: that tells the shapes in every kind of model, and which tensors are cast on
their way from layer to layer. Nothing is executed and nothing is changed.

A backward pass has about twice the multiplications, in the same layers and dtypes, so
that shares of the forward pass are shares of a training step.
"""

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp import hardware
from tfamp.diagnostics import layer_work
from tfamp.precision import assign

NARROW = ("float16", "bfloat16")


class LayerFacts(NamedTuple):
    """One layer, without the layers in it.

    Attributes:
      path: Its path in the model.
      compute_dtype: Its compute dtype, e.g. "bfloat16".
      variable_dtype: Dtype of its variables.
      weights: Number of its trainable scalars.
      multiplications: Of all its calls in a forward pass.
      is_uncounted: Whether it has a matrix of weights, and what it multiplies is not
        known.
      rows: The most rows that its weights are multiplied by in a call; 0 if none.
      sizes: (role, size) pairs of its products, such as ("units", 512).
      elements: Elements that its calls return; 0 of layers around others.
      casts: Elements of other layers' results that are cast before it takes them.
      has_bias: Whether `BiasAddGrad` sums the gradient of its bias.
      data_format: "channels_last" or "channels_first" of a convolution, else "".
      depthwise: Whether it is a depthwise or separable convolution.
      activation: Name of its activation, "" without one.
      output_dtype: Dtype of an output of the model that comes from it, else "".
    """

    path: str
    compute_dtype: str = "float32"
    variable_dtype: str = "float32"
    weights: int = 0
    multiplications: int = 0
    is_uncounted: bool = False
    rows: int = 0
    sizes: tuple[tuple[str, int], ...] = ()
    elements: int = 0
    casts: int = 0
    has_bias: bool = False
    data_format: str = ""
    depthwise: bool = False
    activation: str = ""
    output_dtype: str = ""

    @property
    def is_narrow(self) -> bool:
        """Whether it computes in 16 bits."""
        return self.compute_dtype in NARROW


class Step(NamedTuple):
    """A training step as the rules see it.

    Attributes:
      device: Where it runs.
      layers: The model's layers, those with most work first.
      batch_size: Examples in a batch.
      jit_compile: Whether XLA compiles it.
      allows_xla: Whether Keras would let XLA compile its layers.
      runs_eagerly: Whether the model was compiled with `run_eagerly=True`.
      rewrite: Dtype that graphs are rewritten to; None without a rewrite.
      tensor_float_32: Whether float32 products may use TF32.
      scales_loss: Whether the optimizer scales the loss; None if not compiled.
      sums_biases: Whether bias gradients are summed rightly, as under `enable`.
    """

    device: hardware.DeviceDescription
    layers: tuple[LayerFacts, ...]
    batch_size: int
    jit_compile: bool = False
    allows_xla: bool = True
    runs_eagerly: bool = False
    rewrite: str | None = None
    tensor_float_32: bool = True
    scales_loss: bool | None = None
    sums_biases: bool = False

    @property
    def multiplications(self) -> int:
        """Multiplications of a forward pass."""
        return sum(layer.multiplications for layer in self.layers)

    @property
    def narrow(self) -> str | None:
        """The 16-bit dtype that multiplies most, or is in most layers; else None."""
        work = dict.fromkeys(NARROW, 0)
        for layer in self.layers:
            # Models around others have a dtype, and compute nothing.
            if layer.is_narrow and (layer.multiplications or layer.elements):
                work[layer.compute_dtype] += max(1, layer.multiplications)
        most = max(work, key=work.__getitem__)
        return most if work[most] else None

    @property
    def is_fast(self) -> bool:
        """Whether the model has 16 bits, and they are fast on the device."""
        return self.narrow is not None and self.support(self.narrow).fast

    def support(self, name: str) -> hardware.PrecisionSupport:
        """Returns the support of a format on the device."""
        return hardware.describe_support(self.device)[name]

    def format_of(self, layer: LayerFacts) -> str:
        """Returns the format that a layer multiplies in; "tf32" is one."""
        dtype = layer.compute_dtype
        if dtype == "float32" and self.rewrite and not self.jit_compile:
            return self.rewrite  # It takes every float32 product: its allowlist.
        narrowed = self.tensor_float_32 and self.support("tf32").supported
        return "tf32" if dtype == "float32" and narrowed else dtype

    def share(
        self, layers: Iterable[LayerFacts], field: str = "multiplications"
    ) -> float:
        """Returns the layers' share of the model's multiplications or elements."""
        whole = "elements" if field == "casts" else field
        total = max(1, sum(getattr(layer, whole) for layer in self.layers))
        return min(1.0, sum(getattr(layer, field) for layer in layers) / total)

    def shares_of_formats(self) -> dict[str, float]:
        """Returns format -> share of the multiplications."""
        work = [layer for layer in self.layers if layer.multiplications]
        names = dict.fromkeys(self.format_of(layer) for layer in work)
        return {
            name: self.share(x for x in work if self.format_of(x) == name)
            for name in names
        }


def collect(model: keras.Model, specs: Any) -> tuple[LayerFacts, ...]:
    """Traces a model and returns the facts about its layers.

    Args:
      model: A built model, compiled or not.
      specs: `tf.TensorSpec`s of known shapes, structured as the model's inputs.

    Returns:
      The layers, those that multiply most first.

    Raises:
      ValueError: If the model cannot be traced.
    """
    places = assign.walk(model)
    calls, outputs = _trace(model, [place.layer for place in places], specs)
    # A cell counts as the recurrent layer around it.
    recurrent = (keras.layers.RNN, keras.layers.StackedRNNCells)
    facts = [
        _facts(place, calls[id(place.layer)], outputs.get(id(place.layer), ""))
        for place in places
        if not any(isinstance(holder, recurrent) for holder in place.holders)
    ]
    return tuple(sorted(facts, key=lambda layer: -layer.multiplications))


# ---- The trace ----


def _trace(model, layers, specs):
    """Watches the calls of layers while a model is traced.

    Returns:
      {id of a layer: [(shapes of its inputs, shape of its result, elements cast)]}, and
      {id of a layer: dtype of an output that comes from it}.
    """
    calls, outputs = {id(layer): [] for layer in layers}, {}
    makers = {}  # Of tensors: inner layers come before those around them.

    def watched(layer):
        original = layer.call

        @functools.wraps(original)
        def call(*args, **kwargs):
            returned = original(*args, **kwargs)
            inputs, results = _tensors((args, kwargs)), _tensors(returned)
            for tensor in results:
                makers.setdefault(tensor.ref(), layer)
            shapes = [x.shape for x in (*inputs, *results[:1])]
            if inputs and results and all(s.is_fully_defined() for s in shapes):
                *taken, result = (shape.as_list() for shape in shapes)
                # Some layers, such as normalizations, end in a cast.
                cast = [x for x in inputs if x.ref() not in makers and _is_cast(x)]
                elements = sum(math.prod(x.shape) for x in cast)
                calls[id(layer)].append((taken, result, elements))
            return returned

        return call

    def forward(inputs):
        results = model(inputs, training=True)
        for tensor in _tensors(results):
            # A model may end in a cast, or an operation, of its own.
            made = tensor.op.inputs[0] if tensor.op.type == "Cast" else tensor
            layer = makers.get(tensor.ref()) or makers.get(made.ref()) or model
            if tensor.dtype.is_floating:
                outputs[id(layer)] = tensor.dtype.name
        return results

    with unchanged(layers):
        for layer in layers:
            if not isinstance(layer, keras.Model):
                # Past Keras, which would look for layers and variables in it.
                object.__setattr__(layer, "call", watched(layer))
        try:
            tf.function(forward, autograph=False).get_concrete_function(specs)
        except Exception as error:
            raise ValueError(
                f"Model {model.name!r} cannot be traced with inputs "
                f"{keras.tree.map_structure(str, specs)}: {error} Pass `inputs`, a "
                "batch as the model takes it."
            ) from error
    return calls, outputs


def _tensors(nested):
    return [x for x in keras.tree.flatten(nested) if tf.is_symbolic_tensor(x)]


def _is_cast(tensor):
    """Whether a tensor is a cast of floats; inputs of a model must be cast."""
    return (
        tensor.op.type == "Cast"
        and tensor.op.inputs[0].op.type != "Placeholder"
        and tensor.op.inputs[0].dtype.is_floating
    )


@contextlib.contextmanager
def unchanged(layers: Iterable[keras.layers.Layer]) -> Iterator[None]:
    """Scopes a trace: afterwards no layer holds a tensor, a loss or a `call` of it."""
    kept = [(layer, dict(vars(layer))) for layer in layers]
    # Keras 3.15 has no public setter of what `add_loss` and activity regularizers add;
    # guarded by tests/contract/test_audit.py.
    for layer, _ in kept:
        vars(layer).update(_losses=list(layer._losses), _loss_ids=set(layer._loss_ids))
    try:
        yield
    finally:
        for layer, attributes in kept:
            vars(layer).clear()
            vars(layer).update(attributes)


# ---- Facts of a layer ----


def _facts(place, calls, output_dtype) -> LayerFacts:
    layer = place.layer
    inner = layer._flatten_layers(include_self=False)
    if isinstance(layer, keras.layers.RNN):
        inner = []  # Its cells count as its own.
    theirs = {id(w) for each in inner for w in each.weights}
    own = [w for w in layer.trainable_weights if id(w) not in theirs]
    work = [layer_work.of_call(layer, taken, result) for taken, result, _ in calls]
    multiplications = sum(each.multiplications for each in work)
    looks_up = isinstance(layer, keras.layers.Embedding)
    activation = getattr(getattr(layer, "activation", None), "__name__", "")
    # oneDNN sums the bias gradient of Conv2D with the convolution's own, in float32; a
    # frozen kernel has none.
    fused = isinstance(layer, keras.layers.Conv2D) and len(own) > 1
    return LayerFacts(
        path=place.path,
        compute_dtype=keras.backend.standardize_dtype(layer.compute_dtype),
        variable_dtype=keras.backend.standardize_dtype(layer.variable_dtype),
        weights=sum(math.prod(w.shape) for w in own),
        multiplications=multiplications,
        is_uncounted=not (multiplications or looks_up)
        and any(len(w.shape) > 1 for w in own),
        rows=max((each.rows for each in work), default=0),
        sizes=tuple(dict.fromkeys(size for each in work for size in each.sizes)),
        elements=0 if inner else sum(math.prod(result) for _, result, _ in calls),
        casts=0 if inner else sum(elements for _, _, elements in calls),
        has_bias=any(w is getattr(layer, "bias", None) for w in own) and not fused,
        data_format=getattr(layer, "data_format", None) or "",
        depthwise=isinstance(layer, layer_work.DEPTHWISE),
        activation="softmax" if isinstance(layer, keras.layers.Softmax) else activation,
        output_dtype=output_dtype,
    )
