"""Plain facts about the layers of a built model, for the rules of an audit to read.

The model is traced once, forward with `training=True`, and the calls of its layers are
watched: that tells the shapes in every kind of model, and which tensors are cast on
their way from layer to layer. Nothing is executed and nothing is changed.

A backward pass has about twice the multiplications, in the same layers and dtypes, so
that shares of the forward pass are shares of a training step.
"""

import collections
import math
from typing import Any, NamedTuple

import keras

from tfamp.inspect import model_inputs, quantized, slow_layers, structure, traces
from tfamp.precision import overrides, plan

_KINDS = keras.layers
_TRANSPOSED = (_KINDS.Conv1DTranspose, _KINDS.Conv2DTranspose, _KINDS.Conv3DTranspose)
_CONVOLUTIONS = (
    _KINDS.Conv1D,
    _KINDS.Conv2D,
    _KINDS.Conv3D,
    *_TRANSPOSED,
    *slow_layers.DEPTHWISE,
)
_IMAGE_CHANNELS = 4  # An input of no more channels is taken to be an image.


class LayerFacts(NamedTuple):
    """One layer, without the layers in it."""

    path: str
    compute_dtype: str = "float32"
    product_dtype: str = ""  # Of its product, where that is another one: "float8".
    variable_dtype: str = "float32"
    weights: int = 0  # Trainable scalars.
    multiplications: int = 0  # Of all its calls in a forward pass.
    is_uncounted: bool = False  # It has a matrix, and what it multiplies is not known.
    rows: int = 0  # The most that its weights are multiplied by in a call.
    sizes: tuple[tuple[str, int], ...] = ()  # (role, size) of products: ("units", 512).
    elements: int = 0  # That its calls return; 0 of layers around others.
    # Elements of other layers' results, cast before it takes them, except next to
    # layers that tfamp's plan keeps in float32.
    casts: int = 0
    has_bias: bool = False  # Whose gradient `BiasAddGrad` sums.
    data_format: str = ""  # Of a convolution.
    depthwise: bool = False  # A depthwise or separable convolution.
    is_batch_norm: bool = False
    slow: str = ""  # How much slower in bfloat16 than in float32, on CPUs.
    activation: str = ""
    output_dtype: str = ""  # Of an output of the model that comes from it.
    planned: str = ""  # Why tfamp chose its dtype; "" where the user did.
    is_kept: bool = False  # Whether a rule of tfamp's plan keeps it in float32.


def _is_kept(layer):
    reason = _planned(layer)
    by_rule = reason != "" and not reason.startswith(plan.BY_MODE)
    return by_rule and layer.compute_dtype == "float32"


def _planned(layer):
    """Returns why the plan in force chose the layer's dtype; "" if the user did."""
    reason = plan.reason_of(layer)
    return "" if reason == plan.AS_MADE or overrides.REQUESTED in reason else reason


def collect(model: keras.Model, specs: Any) -> tuple[LayerFacts, ...]:
    """Traces a model and returns the facts about its layers.

    Args:
      model: A built model, compiled or not.
      specs: `tf.TensorSpec`s of known shapes, structured as the model's inputs.

    Returns:
      The layers, those that multiply most first.

    Raises:
      ExportError: If the model cannot be traced.
    """
    places = structure.walk(model)
    calls, outputs = _trace(model, specs)
    # A cell counts as the recurrent layer around it.
    recurrent = (_KINDS.RNN, _KINDS.StackedRNNCells)
    facts = [
        _facts(place, calls[id(place.layer)], outputs.get(id(place.layer), ""))
        for place in places
        if not any(isinstance(holder.layer, recurrent) for holder in place.holders)
    ]
    return tuple(sorted(facts, key=lambda layer: -layer.multiplications))


# ---- The trace ----


def _trace(model, specs):
    """Watches the calls of layers while a model is traced.

    Returns:
      {id of a layer: [(shapes of its inputs, shape of its result, elements cast)]}, and
      {id of a layer: dtype of an output that comes from it}.
    """
    calls, outputs = collections.defaultdict(list), {}
    makers = {}  # Of tensors: inner layers come before those around them.
    input_specs = keras.tree.map_structure(str, specs)
    advice = (
        f"cannot be traced with inputs {input_specs}. Pass `inputs`, a batch in the "
        "model's structure"
    )
    with model_inputs.explained(model, advice):
        graph, traced = traces.trace(model, (specs,), {"training": True})
    for layer, inputs, results, _ in traced:
        if isinstance(layer, keras.Model):
            continue
        for tensor in results:
            makers.setdefault(tensor.ref(), layer)
        shapes = [x.shape for x in (*inputs, *results[:1])]
        if inputs and results and all(s.is_fully_defined() for s in shapes):
            # Some layers, such as normalizations, end in a cast.
            cast = [x for x in inputs if x.ref() not in makers and _is_cast(x)]
            elements = sum(
                math.prod(x.shape)
                for x in cast
                if not _is_kept(layer)
                and not _is_kept(makers.get(x.op.inputs[0].ref(), layer))
            )
            calls[id(layer)].append((shapes[:-1], shapes[-1], elements))
    for tensor in (x for x in graph.outputs if x.dtype.is_floating):
        source = tensor  # A model may end in a cast, or an operation, of its own.
        while source.ref() not in makers and source.op.type in ("Cast", "Identity"):
            source = source.op.inputs[0]
        outputs[id(makers.get(source.ref(), model))] = tensor.dtype.name
    return calls, outputs


def _is_cast(tensor):
    """Whether a tensor is a cast of floats; inputs of a model must be cast."""
    sources = tensor.op.inputs if tensor.op.type == "Cast" else ()
    return any(x.op.type != "Placeholder" and x.dtype.is_floating for x in sources)


# ---- Facts of a layer ----


def _facts(place, calls, output_dtype) -> LayerFacts:
    layer = place.layer
    is_alone = isinstance(layer, _KINDS.RNN)  # Its cells count as its own.
    inner = [] if is_alone else structure.children(layer)
    own = layer.weights if is_alone else structure.own_weights(layer)
    own = [weight for weight in own if weight.trainable]
    work = [_work(layer, taken, result) for taken, result, _ in calls]
    multiplications = sum(products for products, _, _ in work)
    matrices = () if isinstance(layer, _KINDS.Embedding) else own  # It looks up.
    activation = getattr(getattr(layer, "activation", None), "__name__", "")
    is_float8 = quantized.quantization_of(layer) == quantized.FLOAT8
    # oneDNN sums the bias gradient of Conv2D with the convolution's own, in float32; a
    # frozen kernel has none.
    fused = isinstance(layer, _KINDS.Conv2D) and len(own) > 1
    return LayerFacts(
        path=place.path,
        compute_dtype=keras.backend.standardize_dtype(layer.compute_dtype),
        product_dtype="float8" if is_float8 else "",
        variable_dtype=keras.backend.standardize_dtype(layer.variable_dtype),
        weights=sum(math.prod(w.shape) for w in own),
        multiplications=multiplications,
        is_uncounted=not multiplications and any(len(w.shape) > 1 for w in matrices),
        rows=max((rows for _, rows, _ in work), default=0),
        sizes=tuple(dict.fromkeys(size for _, _, sizes in work for size in sizes)),
        elements=0 if inner else sum(math.prod(result) for _, result, _ in calls),
        casts=0 if inner else sum(elements for _, _, elements in calls),
        has_bias=any(w is getattr(layer, "bias", None) for w in own) and not fused,
        data_format=getattr(layer, "data_format", None) or "",
        depthwise=isinstance(layer, slow_layers.DEPTHWISE),
        is_batch_norm=isinstance(layer, _KINDS.BatchNormalization),
        slow=slow_layers.ratio_of(layer),
        activation="softmax" if isinstance(layer, _KINDS.Softmax) else activation,
        output_dtype=output_dtype,
        planned=_planned(layer),
        is_kept=_is_kept(layer),
    )


def _work(layer, inputs, result):
    """Returns (multiplications, rows that weights meet, (role, size) pairs) of a call.

    | Dense, EinsumDense      | rows x features that are summed x units              |
    | Embedding, reversed     | the same: positions x width x vocabulary             |
    | convolutions            | positions of the result x elements of the kernel     |
    | transposed convolutions | positions of the input x elements of the kernel      |
    | recurrent layers        | examples x steps x elements of the cells' kernels    |
    | MultiHeadAttention      | 2 x examples x heads x queries x keys x key_dim      |

    What any other layer computes is not counted.
    """
    source = inputs[0]
    if not (len(source) and len(result)):  # A scalar, of a layer of the user's own.
        return 0, 0, ()
    if isinstance(layer, _KINDS.MultiHeadAttention):
        keys = inputs[min(1, len(inputs) - 1)][1]
        products = 2 * math.prod(source[:-1]) * keys * layer.num_heads * layer.key_dim
        return products, 0, (("key_dim", layer.key_dim),)
    if isinstance(layer, _CONVOLUTIONS):
        return _of_convolution(layer, source, result)
    if isinstance(layer, _KINDS.RNN):
        kernels = [w for w in layer.weights if "bias" not in w.name]
        elements = sum(math.prod(w.shape) for w in kernels if len(w.shape) == 2)
        sizes = ("input features", source[-1]), ("units", getattr(layer, "units", 0))
        return source[0] * source[1] * elements, source[0], sizes
    features, units = source[-1], result[-1]
    kernel = tuple(getattr(getattr(layer, "kernel", None), "shape", ()))
    # A tied embedding makes the logits.
    is_tied = isinstance(layer, _KINDS.Embedding) and len(source) == len(result)
    if isinstance(layer, _KINDS.EinsumDense):
        labels, weights = layer.equation.replace(" ", "").split("->")[0].split(",")
        extents = list(zip(weights, kernel, strict=True))
        features = math.prod(size for label, size in extents if label in labels)
        units = math.prod(size for label, size in extents if label not in labels)
    elif kernel != (features, units) and not is_tied:
        return 0, 0, ()
    rows = math.prod(source) // features
    sizes = [("input features", features), ("units", units)]
    if len(source) == 2:
        sizes.append(("batch size", rows))
    return rows * features * units, rows, sizes


def _of_convolution(layer, source, result):
    axis = 1 if layer.data_format == "channels_first" else -1
    shape = source if isinstance(layer, _TRANSPOSED) else result
    rows = math.prod(shape) // shape[axis]
    kernels = sum(math.prod(w.shape) for w in layer.weights if len(w.shape) > 1)
    role = "image channels" if source[axis] <= _IMAGE_CHANNELS else "input channels"
    sizes = ((role, source[axis]), ("filters", result[axis]))
    # Depthwise kernels use no Tensor Cores: nothing to align.
    return (
        rows * kernels,
        rows,
        () if isinstance(layer, slow_layers.DEPTHWISE) else sizes,
    )
