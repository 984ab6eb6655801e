"""Where the time of a step goes, estimated from operations and peak rates.

    time of a product = max(operations / peak, bytes / bandwidth)

the roofline of NVIDIA, "GPU Performance Background User's Guide" (2023), 3. Where the
peaks are not known, a fast 16-bit format counts as twice as fast as float32: measured
for products of 2 cores of an AMD EPYC with native bfloat16, and less than any Tensor
Core gives. The shares are estimates for ranking, and no forecast of a speed.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tfamp import hardware
from tfamp.diagnostics import alignment, devices, model_facts

_FAST = 2.0
# Share of a step that is no product, where it cannot be estimated.
_OTHER_SHARE = 0.3


class Situation(NamedTuple):
    """Where, and how, the model trains.

    Attributes:
      subject: The device.
      jit_compile: Whether XLA compiles the step.
      tensor_float_32: Whether float32 products may use TF32.
      graph_rewrite: Dtype that graphs are rewritten to; None without a rewrite.
      bias_gradient_fixed: Whether bias gradients are kept from being summed in
        bfloat16, as under `tfamp.enable()`.
      step_seconds: Measured time of a step without waiting for data; None unknown.
      pipeline_seconds: Measured time to draw a batch; None unknown.
      xla_possible: Whether Keras would let XLA compile the step.
    """

    subject: devices.Subject
    jit_compile: bool = False
    tensor_float_32: bool = True
    graph_rewrite: str | None = None
    bias_gradient_fixed: bool = False
    step_seconds: float | None = None
    pipeline_seconds: float | None = None
    xla_possible: bool = True

    @property
    def device(self) -> hardware.DeviceDescription:
        """The device's description."""
        return self.subject.device

    @property
    def uses_cudnn(self) -> bool:
        """Whether cuDNN may run recurrent layers: on NVIDIA's GPUs without XLA."""
        return self.device.compute_capability is not None and not self.jit_compile

    def support(self, name: str) -> hardware.PrecisionSupport:
        """Returns the support of a format on the device."""
        return hardware.describe_support(self.device)[name]

    def format_of(self, product: alignment.Product) -> str:
        """Returns the format that a product computes in; "tf32" is one."""
        if product.dtype != "float32" or not self.tensor_float_32:
            return product.dtype
        return "tf32" if self.support("tf32").supported else "float32"

    def rate(self, name: str) -> float:
        """Returns the peak of a format: FLOP/s, or relative to float32 if unknown."""
        peaks = self.subject.peaks
        fast = name != "float64" and self.support(name).fast
        if peaks is None:
            return _FAST if fast and name in model_facts.NARROW else 1.0
        if name in model_facts.NARROW and fast and peaks.half:
            return 1e12 * peaks.half
        if name == "tf32" and peaks.tf32:
            return 1e12 * peaks.tf32
        return 1e12 * peaks.float32

    def seconds(self, product: alignment.Product) -> float:
        """Returns a product's time at the peak rate; relative if that is unknown."""
        return product.flops / self.rate(self.format_of(product))

    def share(
        self,
        facts: model_facts.ModelFacts,
        chosen: Callable[[alignment.Product], bool],
    ) -> float:
        """Returns the share of the products' time that some of them take."""
        total = sum(map(self.seconds, facts.products))
        some = sum(self.seconds(each) for each in facts.products if chosen(each))
        return some / total if total else 0.0

    def other_seconds(self, facts: model_facts.ModelFacts) -> float:
        """Returns the time of what is no product, on a device with known peaks."""
        element = 2 if narrow_dtype(facts) else 4
        return 2 * element * facts.elements / (1e9 * self.subject.peaks.bandwidth)

    def other_share(self, facts: model_facts.ModelFacts) -> float:
        """Returns the share of time of what is no product, without fusion.

        Each element is read and written once. Without the device's figures 0.3.
        """
        if self.subject.peaks is None:
            return _OTHER_SHARE if facts.elements else 0.0
        other = self.other_seconds(facts)
        total = other + roofline(facts.products, self).seconds
        return other / total if total else 0.0


class Roofline(NamedTuple):
    """Time of products: `seconds` in all, of which `ideal` at the peak rate."""

    seconds: float
    ideal: float

    @property
    def lost(self) -> float:
        """Share of the time that is spent on moving data."""
        return 1.0 - self.ideal / self.seconds if self.seconds else 0.0


def roofline(
    products: Iterable[alignment.Product], situation: Situation, grown: float = 1.0
) -> Roofline:
    """Returns the time of products on a device with known peaks.

    Args:
      products: The products.
      situation: Where they run.
      grown: How many times as large a batch.
    """
    seconds = ideal = 0.0
    bandwidth = 1e9 * situation.subject.peaks.bandwidth
    for each in products:
        element = 2 if each.dtype in model_facts.NARROW else 4
        moved = each.repeats * (grown * each.activations + each.weights)
        compute = grown * situation.seconds(each)
        seconds += max(compute, element * moved / bandwidth)
        ideal += compute
    return Roofline(seconds, ideal)


def narrow_dtype(facts: model_facts.ModelFacts) -> str | None:
    """Returns the 16-bit dtype of most products, or layers; None in a float32 model."""
    counts = {
        dtype: flops
        for dtype, flops in facts.flops_by_dtype().items()
        if dtype in model_facts.NARROW
    }
    dtypes = [x.compute_dtype for x in facts.layers if not x.is_model]
    layers = [dtype for dtype in dtypes if dtype in model_facts.NARROW]
    return next(iter(counts), None) or next(iter(layers), None)
