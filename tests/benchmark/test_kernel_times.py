"""Shares of the kernels of a step, from made profiles and from real ones."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.xla.service.hlo_pb2 import (
    HloProto,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorflow.tsl.profiler.protobuf.xplane_pb2 import (
    XSpace,  # pyright: ignore[reportAttributeAccessIssue]
)

from tfamp.benchmark import kernel_times
from tfamp.precision import control

layers = keras.layers
CPU, GPU = "/host:CPU", "/device:GPU:0"
MICROSECOND = 10**6  # In the profile's picoseconds.


class Made:
    """A profile of given events."""

    def __init__(self):
        self.space = XSpace()

    def line(self, plane, name, events):
        """Adds (name, start, duration, {stat: text}), times in microseconds."""
        plane = self._plane(plane)
        line = plane.lines.add(name=name)
        for name, start, duration, stats in events:
            number = len(plane.event_metadata) + 1
            plane.event_metadata[number].name = name
            event = line.events.add(metadata_id=number)
            event.offset_ps = start * MICROSECOND
            event.duration_ps = duration * MICROSECOND
            for key, text in stats.items():
                event.stats.add(
                    metadata_id=self._stat(plane, key),
                    ref_value=self._stat(plane, text),
                )
        return self

    def module(self, name, opcodes):
        """Adds a module of XLA in which "fusion.N" is of the operation N."""
        proto = HloProto()
        proto.hlo_module.name = name
        for number, opcode in enumerate(opcodes, 1):
            inner = proto.hlo_module.computations.add(id=number)
            inner.instructions.add(name=f"inner.{number}", opcode=opcode)
        entry = proto.hlo_module.computations.add(id=100)
        for number in range(1, len(opcodes) + 1):
            entry.instructions.add(
                name=f"fusion.{number}",
                opcode="fusion",
                called_computation_ids=[number],
            )
        metadata = self._plane("/host:metadata").event_metadata
        stat = metadata[len(metadata) + 1].stats.add()
        stat.bytes_value = proto.SerializeToString()
        return self

    def summarize(self):
        return kernel_times.summarize(kernel_times.read(self.space.SerializeToString()))

    def _plane(self, name):
        found = [plane for plane in self.space.planes if plane.name == name]
        return found[0] if found else self.space.planes.add(name=name)

    def _stat(self, plane, name):
        number = len(plane.stat_metadata) + 1
        plane.stat_metadata[number].name = name
        return number


def test_threads_add_up_and_what_is_no_kernel_does_not_count():
    made = Made().line(
        CPU,
        "tf_Compute/1",
        [
            ("ExecutorState::Process", 0, 1000, {}),
            ("call/dense/Relu:_MklNativeFusedMatMul", 0, 60, {}),
            ("call/dense/Cast:Cast", 60, 10, {}),
            ("EagerLocalExecute: OptionalHasValue", 70, 500, {}),
            ("end: fusion.1", 80, 5, {}),
        ],
    )
    made.line(CPU, "tf_Compute/2", [("call/Mul:Mul", 0, 30, {})])
    made.line(CPU, "tf_data_iterator_get_next/3", [("Cast:Cast", 0, 900, {})])
    found = made.summarize()
    assert found.matrix_share == pytest.approx(0.6)
    assert found.others == (("Mul", pytest.approx(0.3)), ("Cast", pytest.approx(0.1)))
    assert found.reason == ""


def test_a_kernel_within_another_counts_for_itself():
    events = [
        ("f:Scan", 0, 100, {}),
        ("f/a:MatMul", 10, 40, {}),
        ("f/b:Add", 50, 20, {}),
        ("g:Add", 100, 100, {}),
    ]
    found = Made().line(CPU, "python", events).summarize()
    assert found.matrix_share == pytest.approx(40 / 200)
    assert dict(found.others) == pytest.approx({"Scan": 40 / 200, "Add": 120 / 200})


PRODUCTS = (
    *("MatMul", "_FusedMatMul", "_MklMatMul", "_MklNativeFusedMatMul"),
    *("BatchMatMul", "BatchMatMulV2", "_MklBatchMatMulV2", "_MklFusedBatchMatMulV2"),
    *("Einsum", "Conv2D", "_FusedConv2D", "_MklNativeFusedConv2D", "Conv3D"),
    *("Conv2DBackpropInput", "_MklNativeConv2DBackpropFilter"),
    *("Conv3DBackpropFilterV2", "DepthwiseConv2dNative", "CudnnRNNBackpropV3"),
    *("_MklNativeFusedDepthwiseConv2dNative", "DepthwiseConv2dNativeBackpropInput"),
)


@pytest.mark.parametrize("kind", PRODUCTS)
def test_products_under_all_their_names(kind):
    made = Made().line(CPU, "tf_Compute/1", [(f"node:{kind}", 0, 5, {})])
    assert made.summarize() == kernel_times.KernelTimes(1.0, (), "")


@pytest.mark.parametrize("kind", ["Mul", "_MklSoftmax", "ConvertToX", "BiasAddGrad"])
def test_other_kernels_are_no_products(kind):
    made = Made().line(CPU, "tf_Compute/1", [(f"node:{kind}", 0, 5, {})])
    assert made.summarize().matrix_share == 0


def test_at_most_five_others_the_largest_first():
    events = [(f"node:Kind{n}", 100 * n, n, {}) for n in range(1, 8)]
    found = Made().line(CPU, "tf_Compute/1", events).summarize()
    assert [name for name, _ in found.others] == [f"Kind{n}" for n in (7, 6, 5, 4, 3)]
    assert found.others[0][1] == pytest.approx(7 / 28)


def compiled(module):
    """A function of XLA that takes 20 on a CPU, beside a product of 60."""
    stats = {"hlo_op": "fusion.1", "hlo_module": module}
    return Made().line(
        CPU,
        "tf_Compute/1",
        [
            ("CpuExecutable::ExecuteAsyncOnStream", 0, 20, {}),
            ("fusion.1", 5, 8, stats),
            ("node:MatMul", 20, 60, {}),
        ],
    )


def test_a_compiled_function_has_its_name():
    module = "a_inference_gelu_forward_140__.1"
    found = compiled(module).module(module, ["erf"]).summarize()
    assert found.matrix_share == pytest.approx(60 / 80)
    assert found.others == (("gelu_forward (XLA)", pytest.approx(20 / 80)),)


@pytest.mark.parametrize("opcode", ["dot", "convolution"])
def test_products_that_xla_compiled_for_a_cpu_leave_no_share(opcode):
    module = "a_inference_step_1__.2"
    found = compiled(module).module(module, ["erf", opcode]).summarize()
    assert found.matrix_share is None
    assert found.others == ()
    assert found.reason.startswith("XLA computed products")


def test_a_module_that_the_profile_does_not_show_is_not_guessed_at():
    assert compiled("a_inference_step_1__.2").summarize().matrix_share is None


def test_kernels_of_a_gpu_belong_to_their_operation_or_instruction():
    module = "a_inference_step_1__.2"
    made = Made().line(
        GPU,
        "Stream #13(Compute)",
        [
            ("sm90_xmma_gemm", 0, 40, {"tf_op": "dense/MatMul:MatMul"}),
            ("splitKreduce", 40, 10, {"tf_op": "dense/MatMul:MatMul"}),
            ("k1", 50, 10, {"tf_op": "Mul:Mul"}),
            ("k2", 60, 20, {"hlo_op": "fusion.1", "hlo_module": module}),
            ("k3", 80, 15, {"hlo_op": "fusion.2", "hlo_module": module}),
            ("MemcpyD2H", 95, 5, {}),
        ],
    )
    made.line(GPU, "XLA Ops", [("fusion.1", 0, 500, {})])
    made.line(CPU, "tf_Compute/1", [("node:Add", 0, 500, {})])
    found = made.module(module, ["dot", "tanh"]).summarize()
    assert found.matrix_share == pytest.approx(0.7)
    assert dict(found.others) == pytest.approx(
        {"fusion": 0.15, "Mul": 0.1, "MemcpyD2H": 0.05}
    )


def test_no_kernels_no_share():
    found = Made().summarize()
    assert found == kernel_times.KernelTimes(None, (), "the profile has no kernels")


# ---- Real profiles: the names that TensorFlow gives ----


def test_a_function_of_products_and_one_of_none():
    x = tf.random.stateless_normal([256, 256], (1, 2))

    @tf.function
    def products(x):
        for _ in range(8):
            x = tf.matmul(x, x) * 1e-3
        return x[0, 0]

    @tf.function
    def others(x):
        for _ in range(8):
            x = tf.cumsum(x)
        return x[0, 0]

    for function, low, high in ((products, 0.5, 1.0), (others, 0.0, 0.0)):
        float(function(x))
        found = kernel_times.profile(lambda f=function: float(f(x)), 3)
        assert found.reason == "" and found.matrix_share is not None
        assert low <= found.matrix_share <= high
        total = found.matrix_share + sum(share for _, share in found.others)
        assert total == pytest.approx(1.0, abs=0.05)
    assert found.others[0][0] == "Cumsum"


def test_every_product_of_a_step_is_found_also_beside_fused_kernels(monkeypatch):
    kernels = []
    summarize = kernel_times.summarize
    monkeypatch.setattr(
        kernel_times,
        "summarize",
        lambda found: summarize(kernels.extend(found) or kernels),
    )
    with control.enabled("mixed_bfloat16"):
        model = keras.Sequential(
            [
                keras.Input((9, 16)),
                layers.LSTM(8),
                layers.Dense(64, "gelu"),
                layers.Dropout(0.2),
                layers.Dense(3, dtype="float32"),
            ]
        )
        model.compile(
            "sgd",
            "mse",
            jit_compile=False,  # pyright: ignore[reportArgumentType]
        )
        batch = np.zeros((4, 9, 16), "float32"), np.zeros((4, 3), "float32")
        model.train_on_batch(*batch)
        found = kernel_times.profile(lambda: model.train_on_batch(*batch), 2)
    # Each time step: two products forward, and three for gradients; each dense layer
    # has three.
    assert sum(1 for kernel in kernels if kernel.is_product) == 2 * (9 * 5 + 6)
    assert found.reason == ""
    assert found.matrix_share is not None and 0 < found.matrix_share < 1
    fused = {kernel.name for kernel in kernels if kernel.name.endswith(" (XLA)")}
    assert len(fused) >= 3  # Dropout, an activation, and its gradient.
    assert not any(name.startswith(("a_inference", "function")) for name in fused)


def test_a_step_compiled_by_xla_says_why_there_is_no_share():
    if tf.config.get_visible_devices("GPU"):
        pytest.skip("a GPU's kernels tell their instruction")

    @tf.function(jit_compile=True)
    def step(x):
        return tf.reduce_sum(tf.tanh(tf.matmul(x, x)))

    x = tf.ones([64, 64])
    float(step(x))
    found = kernel_times.profile(lambda: float(step(x)), 2)
    assert found.matrix_share is None
    assert found.reason.startswith("XLA computed products")


def test_somebody_elses_profile_goes_on(tmp_path):
    calls = []
    tf.profiler.experimental.start(str(tmp_path))
    try:
        found = kernel_times.profile(lambda: calls.append(1), 2)
    finally:
        tf.profiler.experimental.stop()
    assert found == kernel_times.KernelTimes(None, (), "another profile is being taken")
    assert not calls


def test_an_error_in_a_step_ends_the_profile(tmp_path):
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        kernel_times.profile(fail, 1)
    tf.profiler.experimental.start(str(tmp_path))  # Not in use any more.
    tf.profiler.experimental.stop(save=False)
