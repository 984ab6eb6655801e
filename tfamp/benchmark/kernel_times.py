"""What the kernels of a step take: matrix products, and what else.

Read from TensorFlow's profile:

| where                     | kernel                 | is shown as               |
| ------------------------- | ---------------------- | ------------------------- |
| CPU                       | one of TensorFlow's    | type of its operation     |
| CPU, compiled by XLA      | the whole function     | its name, "(XLA)"         |
| CPU, with products by XLA | no share is told       |                           |
| GPU                       | one of an operation    | type of the operation     |
| GPU, compiled by XLA      | one of an instruction  | name of the instruction   |

A kernel within another counts for itself only, and what is no kernel does not count:
waits, calls, copies of the input. So shares add up to 1. Kernels that run at the same
time add up. A product that a library computes together with bias and activation is a
product. On a CPU, XLA goes on with products in threads that no event covers: their
share would be a guess.
"""

import collections
import contextlib
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

_MOST = 5
_HOST, _GPU, _METADATA = "/host:CPU", "/device:GPU:", "/host:metadata"
_INPUT_THREADS = "tf_data"
_COMPILED = "CpuExecutable::ExecuteAsyncOnStream"
_OPERATION = re.compile(r"[^:\s]+:(_?[A-Z]\w*)")  # "node:type".
# What oneDNN and Grappler put before the type of an operation.
_PREFIX = re.compile(r"^_(Mkl)?(Native)?(Fused)?")
_PRODUCT = re.compile(r"(Batch)?MatMul|Einsum|Conv[23]D|DepthwiseConv2d|CudnnRNN")
# An instruction of XLA with the library function that it calls.
_COMPILED_PRODUCT = re.compile(r"dot|convolution|custom-call .*(gemm|matmul|conv|dot)")
# XLA's module "a_inference_forward_253__.3" is of the function `forward`.
_MODULE = re.compile(r"^a_inference_|(_\d+__)?(\.\d+)?$")


class KernelTimes(NamedTuple):
    """Where the kernels' time went.

    Attributes:
      matrix_share: Share of matrix products and convolutions; None if not known.
      others: (type of kernel, share of the whole) of at most five others, largest
        first.
      reason: Why nothing is known; "" if it is.
    """

    matrix_share: float | None
    others: tuple[tuple[str, float], ...]
    reason: str


def profile(step: Callable[[], object], count: int) -> KernelTimes:
    """Runs a step some times under TensorFlow's profiler.

    Args:
      step: Function that runs a step and waits for its end. It was called before: what
        tracing and compiling take would be in the profile.
      count: How often to run it.

    Returns:
      A `KernelTimes`. Profiling takes time: no step that is timed belongs in it.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            tf.profiler.experimental.start(folder)
        except tf.errors.AlreadyExistsError:
            return KernelTimes(None, (), "another profile is being taken")
        with contextlib.ExitStack() as stack:
            stack.callback(tf.profiler.experimental.stop)
            for _ in range(count):
                step()
        files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        return summarize(kernel for file in files for kernel in read(file.read_bytes()))


class Kernel(NamedTuple):
    """What one kernel took.

    Attributes:
      name: What it is shown as.
      seconds: Its time, that of kernels within it not counted.
      is_product: Whether it is a matrix product or a convolution; None: not known.
    """

    name: str
    seconds: float
    is_product: bool | None


def summarize(kernels: Iterable[Kernel]) -> KernelTimes:
    """Returns the shares of some kernels; a pure function."""
    kernels = list(kernels)
    whole = sum(kernel.seconds for kernel in kernels)
    if not whole:
        return KernelTimes(None, (), "the profile has no kernels")
    if any(kernel.is_product is None for kernel in kernels):
        reason = "XLA computed products on the CPU, which its profile does not time"
        return KernelTimes(None, (), reason)
    shares: dict[str, float] = collections.defaultdict(float)
    for kernel in kernels:
        shares["" if kernel.is_product else kernel.name] += kernel.seconds / whole
    products = shares.pop("", 0.0)
    others = sorted(shares.items(), key=lambda other: -other[1])
    return KernelTimes(products, tuple(others[:_MOST]), "")


# ---- Reading a profile ----


class _Event(NamedTuple):
    name: str
    start: int
    end: int
    stats: dict[str, Any]

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e12


def read(profile_bytes: bytes) -> list[Kernel]:
    """Returns the kernels of a profile: of its GPUs, or of the CPU if it has none.

    Args:
      profile_bytes: A serialized `XSpace`, the content of an "xplane.pb".
    """
    # No public reader in TensorFlow 2.21; guarded by the tests.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()  # pyright: ignore[reportAttributeAccessIssue]
    space.ParseFromString(profile_bytes)
    planes = space.planes
    products = {
        module: names
        for plane in planes
        if plane.name == _METADATA
        for module, names in _compiled_products(plane)
    }
    on_gpu = [
        _gpu_kernel(event, products)
        for plane in planes
        if plane.name.startswith(_GPU)
        for line in plane.lines
        if line.name.startswith("Stream")  # Other lines repeat them, by step or layer.
        for event in _events(plane, line)
    ]
    return on_gpu or [
        kernel
        for plane in planes
        if plane.name == _HOST
        for line in plane.lines
        if not line.name.startswith(_INPUT_THREADS)
        for kernel in _cpu_kernels(_events(plane, line), products)
    ]


def _events(plane, line) -> list[_Event]:
    """Returns the events of a line; one around others comes before them."""
    events = []
    for event in line.events:
        kind = plane.event_metadata[event.metadata_id]
        stats = {
            plane.stat_metadata[stat.metadata_id].name: _value(plane, stat)
            for stat in (*kind.stats, *event.stats)
        }
        start = event.offset_ps
        events.append(_Event(kind.name, start, start + event.duration_ps, stats))
    return sorted(events, key=lambda event: (event.start, -event.end))


def _value(plane, stat):
    which = stat.WhichOneof("value")
    value = getattr(stat, which) if which else None
    return plane.stat_metadata[value].name if which == "ref_value" else value


def _compiled_products(plane) -> Iterator[tuple[str, set[str]]]:
    """Yields the name of each module of XLA, and its instructions with products."""
    # No public name in TensorFlow 2.21; guarded by the tests.
    from tensorflow.compiler.xla.service import hlo_pb2

    for metadata in plane.event_metadata.values():
        for stat in metadata.stats:
            if stat.bytes_value:
                proto = hlo_pb2.HloProto()  # pyright: ignore[reportAttributeAccessIssue]
                proto.ParseFromString(stat.bytes_value)
                yield proto.hlo_module.name, _products_of(proto.hlo_module)


def _products_of(module) -> set[str]:
    found, ids = set(), set()
    for computation in module.computations:  # Called ones come before their callers.
        for each in computation.instructions:
            text = f"{each.opcode} {each.custom_call_target}"
            inside = ids.intersection(each.called_computation_ids)
            if inside or _COMPILED_PRODUCT.match(text):
                found.add(each.name)
                ids.add(computation.id)
    return found


def _gpu_kernel(event, products) -> Kernel:
    operation = _OPERATION.fullmatch(str(event.stats.get("tf_op")))
    if operation:
        return _of_operation(operation.group(1), event.seconds)
    instruction = event.stats.get("hlo_op", event.name)
    is_product = instruction in products.get(event.stats.get("hlo_module"), ())
    return Kernel(re.sub(r"[._]\d+$", "", instruction), event.seconds, is_product)


def _of_operation(kind, seconds) -> Kernel:
    kind = _PREFIX.sub("", kind)
    return Kernel(kind, seconds, _PRODUCT.match(kind) is not None)


def _cpu_kernels(events, products) -> Iterator[Kernel]:
    """Yields the kernels of one thread."""
    kernels = [x for x in events if x.name == _COMPILED or _OPERATION.fullmatch(x.name)]
    compiled = [event for event in events if "hlo_module" in event.stats]
    for event, seconds in zip(kernels, _own_seconds(kernels), strict=True):
        operation = _OPERATION.fullmatch(event.name)
        if operation:
            yield _of_operation(operation.group(1), seconds)
            continue
        modules = [
            inner.stats["hlo_module"]
            for inner in compiled
            if event.start <= inner.start < event.end
        ]
        name = _MODULE.sub("", modules[0]) if modules else "function"
        yield Kernel(f"{name} (XLA)", seconds, False)
    # These may run in any thread, also where nothing tells that they were called.
    for event in compiled:
        if products.get(event.stats["hlo_module"], True):
            yield Kernel(event.name, event.seconds, None)


def _own_seconds(events: list[_Event]) -> list[float]:
    """Returns the time of each event without that of the events within it."""
    seconds = [event.seconds for event in events]
    around: list[int] = []
    for index, event in enumerate(events):
        while around and events[around[-1]].end <= event.start:
            around.pop()
        if around:
            seconds[around[-1]] -= event.seconds
        around.append(index)
    return seconds
