"""Facts about the switches of TensorFlow 2.21's kernels that change numbers.

Found in its Linux binaries (which names they hold, what calls the functions that read
them), in its sources, and with XLA's own `XLA_FLAGS=--help`. No other list in
TensorFlow has them.
"""

from typing import Literal, NamedTuple


class Variable(NamedTuple):
    """An environment variable that is on or off.

    Attributes:
      name: Its name.
      needs: "GPU" or "CPU": the device whose kernels read it.
      default: Whether it is on where it is not set.
      effect: What it does.
      read_by: What reads it.
      when: When: "once" at the first such kernel of the process, or each time that
        something happens.
      reader: "bool" reads 0, 1, false and true, and takes the default for anything
        else; "not 0" is on for all but 0; "only 1" is on for 1 alone.
    """

    name: str
    needs: str
    default: bool
    effect: str
    read_by: str
    when: str = "once"
    reader: Literal["bool", "not 0", "only 1"] = "bool"


DETERMINISTIC = "TF_DETERMINISTIC_OPS"
TF32_OVERRIDE = "NVIDIA_TF32_OVERRIDE"
AUTOTUNE = "TF_CUDNN_USE_AUTOTUNE"
ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
VARIABLES = (
    Variable(
        AUTOTUNE,
        "GPU",
        True,
        "measures each convolution's algorithms and takes the fastest, which may "
        "differ from run to run; off: cuDNN's first choice",
        "TensorFlow's convolutions",
        "each time a convolution's kernel is created",
    ),
    Variable(
        "TF_CUDNN_RNN_USE_AUTOTUNE",
        "GPU",
        True,
        "the same for cuDNN's LSTM and GRU",
        "TensorFlow's CudnnRNN",
        "each time it runs",
    ),
    Variable(
        "TF_FP16_CONV_USE_FP32_COMPUTE",
        "GPU",
        True,
        "float16 convolutions accumulate in float32; off: in float16",
        "cuDNN convolutions, XLA's too",
        reader="not 0",
    ),
    Variable(
        "TF_FP16_MATMUL_USE_FP32_COMPUTE",
        "GPU",
        True,
        "float16 matrix products of cuBLASLt (fused, or TF_USE_CUBLASLT=1) accumulate "
        "in float32; off: in float16. Others always accumulate in float32",
        "TensorFlow's cuBLASLt plans",
    ),
    Variable(
        "TF_FP16_RNN_USE_FP32_COMPUTE",
        "GPU",
        True,
        "cuDNN's float16 LSTM and GRU accumulate in float32; off: in float16",
        "TensorFlow's CudnnRNN",
        reader="not 0",
    ),
    Variable(
        "TF_CONV2D_USE_FP16_ACCUMULATE",
        "CPU",
        False,
        "float16 Conv2D without oneDNN accumulates in float16; off: in float32",
        "TensorFlow's Eigen Conv2D",
        reader="only 1",
    ),
    Variable(
        "TF_CUDNN_DETERMINISTIC",
        "GPU",
        False,
        "cuDNN's deterministic algorithms only; op determinism includes it",
        "cuDNN convolutions and pooling",
    ),
    Variable(
        "TF_ENABLE_WINOGRAD_NONFUSED",
        "GPU",
        True,
        "cuDNN may use Winograd's transform, which rounds differently",
        "cuDNN convolutions",
        reader="not 0",
    ),
    Variable(
        "TF_USE_CUBLASLT",
        "GPU",
        False,
        "batched matrix products go through cuBLASLt",
        "TensorFlow's matrix products",
    ),
    Variable(
        "TF_MATMUL_AUTOTUNE_ENABLE",
        "GPU",
        False,
        "measures cuBLASLt's algorithms and takes the fastest",
        "TensorFlow's matrix products",
        "each time a matrix product runs, or its fused kernel is created",
    ),
)
ACCUMULATION = {  # Name -> what on means.
    "TF_FP16_CONV_USE_FP32_COMPUTE": "float32",
    "TF_FP16_MATMUL_USE_FP32_COMPUTE": "float32",
    "TF_FP16_RNN_USE_FP32_COMPUTE": "float32",
    "TF_CONV2D_USE_FP16_ACCUMULATE": "float16",
}
# Default of 2.21 (`XLA_FLAGS=--help`), device, effect.
XLA_FLAGS = {
    "xla_gpu_autotune_level": ("4", "GPU", "measures algorithms; 0: takes the first"),
    "xla_gpu_exclude_nondeterministic_ops": (
        "false",
        "GPU",
        "deterministic kernels only; op determinism asks XLA for it, too",
    ),
    "xla_gpu_enable_fast_min_max": ("false", "GPU", "min and max may drop NaN"),
    "xla_allow_excess_precision": (
        "true",
        "any",
        "leaves out a rounding to 16 bits between fused operations",
    ),
    "xla_cpu_enable_fast_math": ("false", "CPU", "reorders sums, may ignore NaN"),
}
FPMATH = (
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "TF_SET_ONEDNN_FPMATH_MODE",
)
# Named in guides, read by earlier versions; no file of TensorFlow 2.21 has the names.
UNREAD = (
    "TF_CUDNN_USE_FRONTEND",
    "TF_DISABLE_CUBLAS_TENSOR_OP_MATH",
    "TF_DISABLE_CUDNN_TENSOR_OP_MATH",
    "TF_DISABLE_CUDNN_RNN_TENSOR_OP_MATH",
    "TF_DISABLE_WINOGRAD_NONFUSED",
)
