"""Plain facts about a model, for the rules of an audit to read."""

from typing import NamedTuple

from tfamp.diagnostics import alignment

NARROW = ("float16", "bfloat16")


class LayerFacts(NamedTuple):
    """One layer, without the layers in it.

    Attributes:
      path: Its path in the model.
      kind: Name of its class.
      compute_dtype: Its compute dtype, e.g. "bfloat16".
      variable_dtype: Dtype of its variables.
      narrow_variables: Number of its trainable scalars with fewer than 32 bits.
      trains: Whether it has trainable variables.
      products: Its matrix products and convolutions, forward.
      kernels: Number of operations that compute, forward.
      elements: Elements that all but the products write, forward.
      float32_elements: Those of them in float32, casts left out.
      data_format: "channels_last" or "channels_first" of a convolution, else None.
      bias_rows: The most rows that one of its bias gradients sums in bfloat16; 0 if
        none does.
      is_model: Whether it is a model around other layers.
      is_output: Whether an output of the model comes from it.
      ties_output: Whether it is an embedding that can compute the output, too.
      cudnn_kernels: Number of operations where cuDNN runs it, as on an NVIDIA GPU
        without XLA; None if cuDNN does not.
    """

    path: str
    kind: str
    compute_dtype: str
    variable_dtype: str
    narrow_variables: int = 0
    trains: bool = False
    products: tuple[alignment.Product, ...] = ()
    kernels: int = 0
    elements: int = 0
    float32_elements: int = 0
    data_format: str | None = None
    bias_rows: int = 0
    is_model: bool = False
    is_output: bool = False
    ties_output: bool = False
    cudnn_kernels: int | None = None


class CastFacts(NamedTuple):
    """A cast of activations where layers of different dtypes meet.

    Attributes:
      source: Path of the layer that it comes from; "input" for the model's.
      target: Path of the layer that takes it, or of the model whose own operation
        does.
      source_dtype: Dtype before.
      target_dtype: Dtype after.
      elements: Elements cast.
    """

    source: str
    target: str
    source_dtype: str
    target_dtype: str
    elements: int


class OutputFacts(NamedTuple):
    """An output of the model.

    Attributes:
      layer: Path of the layer that it comes from.
      dtype: Dtype of the tensor.
      activation: "Softmax" or "Sigmoid" if it ends in one, else "".
      activation_dtype: Dtype that the activation was computed in.
    """

    layer: str
    dtype: str
    activation: str = ""
    activation_dtype: str = ""


class ModelFacts(NamedTuple):
    """What the rules of an audit read.

    Attributes:
      name: The model's name.
      batch_size: Examples in a batch.
      layers: Its layers, parents first.
      casts: Casts at the borders of layers.
      outputs: Its outputs.
      compiled: Whether it was compiled.
      loss_dtype: Dtype of the compiled loss; "" if not known.
      scales_loss: Whether its optimizer scales the loss; None if not compiled.
      runs_eagerly: Whether it was compiled with `run_eagerly=True`.
      all_counted: Whether every product was counted; if not, notes say which.
      notes: What had to be assumed, for the report.
    """

    name: str
    batch_size: int
    layers: tuple[LayerFacts, ...]
    casts: tuple[CastFacts, ...] = ()
    outputs: tuple[OutputFacts, ...] = ()
    compiled: bool = False
    loss_dtype: str = ""
    scales_loss: bool | None = None
    runs_eagerly: bool = False
    all_counted: bool = True
    notes: tuple[str, ...] = ()

    @property
    def products(self) -> list[alignment.Product]:
        """All matrix products and convolutions, in the order of the layers."""
        return [product for layer in self.layers for product in layer.products]

    @property
    def flops(self) -> int:
        """Operations of all products in one forward pass."""
        return sum(product.flops for product in self.products)

    @property
    def kernels(self) -> int:
        """Number of operations that compute in one forward pass."""
        return sum(layer.kernels for layer in self.layers)

    @property
    def elements(self) -> int:
        """Elements that all other operations write in one forward pass."""
        return sum(layer.elements for layer in self.layers)

    def flops_by_dtype(self) -> dict[str, int]:
        """Returns operations by the products' dtype, the most first."""
        counts: dict[str, int] = {}
        for product in self.products:
            counts[product.dtype] = counts.get(product.dtype, 0) + product.flops
        return dict(sorted(counts.items(), key=lambda item: -item[1]))
