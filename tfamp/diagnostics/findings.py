"""What an audit finds: a finding, and the words of those about layers."""

from typing import NamedTuple

EPYC = "(2 cores of an AMD EPYC)"  # Where it was measured.


class Finding(NamedTuple):
    """One reason why training is slower, or less accurate, than it could be.

    Attributes:
      rule: Name of the rule, such as "alignment".
      share: Share of the model it concerns, from 0 to 1; None if it costs accuracy.
      what: The finding in one phrase.
      evidence: Why it matters, and the layers it was found in.
      advice: What to change.
      layers: Paths of the layers, most work first; empty if it concerns the whole step.
    """

    rule: str
    share: float | None
    what: str
    evidence: str
    advice: str
    layers: tuple[str, ...] = ()


def percent(share: float) -> str:
    """Returns a share for people: 0.123 -> "12%", 0.999 -> "99.9%"."""
    is_round = 0.0995 <= share < 0.995 or share >= 0.9995
    return f"{100 * share:.{0 if is_round else 1}f}%"


# Rule: (what its share is of, None for accuracy; what, why, advice).
OF_LAYERS = {
    "xla": (
        *("elements", "XLA is off"),
        "XLA fuses elementwise operations and casts of weights into other kernels",
        "compile(jit_compile=True), if XLA supports all operations of the step",
    ),
    "tf32": (
        *("multiplications", "TF32 is off"),
        "the device has TF32 tensor cores",
        "use mode 'tf32', or a mixed mode, unless float32's 24 bits are needed",
    ),
    "depthwise": (
        *("elements", "depthwise or separable convolutions in 16 bits"),
        "CPUs have no fast 16-bit kernels for those with strides, and GPUs were "
        "reported to have none (tensorflow/tensorflow#41715)",
        "also measure the model in float32, and with only these layers in float32, "
        "which costs two casts each",
    ),
    "slow": (
        *("elements", "layers that are slower in 16 bits on this device"),
        f"their step was measured beside float32's {EPYC}",
        "under enable they are float32 unless overrides={'.*': mode} says otherwise",
    ),
    "batch_norm": (
        *("elements", "batch normalization gains nothing from 16 bits on a CPU"),
        "Keras computes it in float32, in some ten passes and two casts. A U-Net of 18 "
        "of them took 0.9 to 1.1 times as long in float32 as in bfloat16, without them "
        f"1.4 to 1.9 times {EPYC}",
        "also measure the model in float32",
    ),
    "float32_islands": (
        *("multiplications", "float32 layers in a 16-bit model"),
        "they gain nothing from 16 bits, and cast their inputs and outputs",
        "remove their override or dtype='float32' unless their accuracy needs it; a "
        "large output layer can multiply in 16 bits if Activation('linear', "
        "dtype='float32') casts its logits",
    ),
    "alignment": (
        *("multiplications", "sizes that are not multiples of 16 bytes"),
        "Tensor Cores need multiples of 8 elements in 16 bits, or of 4 in TF32 "
        "(NVIDIA, Matrix Multiplication Background User's Guide, 2.2)",
        "pad to the size after the arrow; unused units, channels and vocabulary "
        "entries are harmless, padded positions of a sequence must be masked",
    ),
    "data_format": (
        *("multiplications", "convolutions use channels_first"),
        "Tensor Cores prefer channels_last (NVIDIA, Convolutional Layers User's "
        "Guide); so does oneDNN: measured 3 times slower, and slower than float32 "
        f"{EPYC}",
        "use data_format='channels_last'",
    ),
    "casts": (
        *("casts", "layers receive inputs of another dtype"),
        "casts move memory and compute nothing, in the forward and the backward pass",
        "give neighbors the same dtype: a layer between others costs two casts",
    ),
    "narrow_variables": (
        *(None, "weights are stored in 16 bits"),
        "an update of less than half an epsilon of its weight is rounded away",
        "use a mixed mode, or float32: both store weights in float32",
    ),
    "loss_scaling": (
        *(None, "float16 layers train without loss scaling"),
        "gradients below half of float16's smallest number underflow to 0",
        "compile after tfamp.enable(), or wrap the optimizer with tfamp.wrap_optimizer",
    ),
    "bias_gradients": (
        *(None, "bias gradients are summed in bfloat16"),
        "BiasAddGrad of TensorFlow 2.21 sums in bfloat16 on a CPU: 4096 ones "
        "make 256, and errors of 70 to 92% were measured with 4096 rows",
        "train under tfamp.enable(), which sums them in float32",
    ),
    "outputs": (
        *(None, "outputs are not in float32"),
        "logarithms and sums of the loss start from rounded values; the cast to "
        "float32 that losses and metrics get does not undo the rounding",
        "dtype='float32' for the output layer, or after a large one "
        "Activation('linear', dtype='float32')",
    ),
}
