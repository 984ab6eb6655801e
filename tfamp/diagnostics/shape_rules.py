"""Rules on shapes: alignment, data format, batch size; pure functions of facts.

Each takes (facts, situation) and returns a list of findings, empty if all is well.
"""

from tfamp import hardware
from tfamp.diagnostics import (
    alignment,
    audit_report,
    estimates,
    format_rules,
    model_facts,
)

Finding = audit_report.Finding
percent, count = audit_report.percent, audit_report.count

_NOTICEABLE_BEST = 0.1  # Of the operations that 128 bytes would help a little.
_BEST_WEIGHT = 0.1  # Ranks 128 bytes below 16: our choice, not measured.
_LOST = 0.4  # Of the products' time, from which on the batch is called too small.
_LARGEST_GROWTH = 64
_LAUNCH_SECONDS = 5e-6  # Of a kernel on a GPU: a rule of thumb.
_FEW_ROWS = 16
_LITTLE_WORK = 25e6  # FLOP of a forward pass.
_BEST_ADVICE = "pad where that is easy: fewer, fuller tiles"
# Of XLA's source (CublasPadForGemms, CudnnPadForConvolutions), not measured.
_XLA_PADS = "; XLA pads such operands itself: with it the cost is that of the copies"
_GUIDE = "NVIDIA, Matrix Multiplication Background User's Guide, 2.2"


def align(
    facts: model_facts.ModelFacts, situation: estimates.Situation
) -> list[Finding]:
    """Sizes that Tensor Cores take less well. CPUs pad inside oneDNN: no rule there."""
    device = situation.device
    if device.kind != "GPU":
        return []
    formats = [
        name for name in (*model_facts.NARROW, "tf32") if situation.support(name).fast
    ]
    found = []
    for name in formats:
        products = [p for p in facts.products if situation.format_of(p) == name]
        found += _alignment(products, name, facts, situation, alignment.REQUIRED_BYTES)
        if device.compute_capability >= hardware.BF16_TENSOR_CORES:
            found += _alignment(products, name, facts, situation, alignment.BEST_BYTES)
    return found


def _alignment(products, name, facts, situation, width):
    narrow = estimates.narrow_dtype(facts)
    hit = alignment.affected(products, name, width)
    required = width == alignment.REQUIRED_BYTES
    # Among the products of this format: others would hide them, and may go.
    flops = sum(product.flops for product in products)
    part = sum(p.flops for p in products if p in hit) / max(1, flops)
    share = situation.share(facts, lambda product: product in hit)
    if not share or part < (format_rules.NOTICEABLE if required else _NOTICEABLE_BEST):
        return []
    # What is left in float32 in a 16-bit model is judged as all else is.
    if narrow not in (None, name) and share < format_rules.NOTICEABLE:
        return []
    misses = [
        miss
        # A float32 layer that is moved to 16 bits should fit there, too.
        for miss in alignment.find_misses(products, name, width, narrow)
        if miss.flops >= format_rules.NOTICEABLE * flops / 4
    ]
    return [
        Finding(
            "alignment" if required else "alignment_best",
            "speed",
            share if required else share * _BEST_WEIGHT,
            f"sizes are no multiples of {width} bytes "
            f"({alignment.elements(name, width)} elements of {name})",
            f"{percent(share)} of the products' time: "
            + format_rules.examples([_describe(x, required) for x in misses])
            + f" ({_GUIDE})"
            + (
                _XLA_PADS
                if required and name != "tf32" and situation.jit_compile
                else ""
            ),
            _padding(misses) if required else _BEST_ADVICE,
            tuple(miss._asdict() for miss in misses),
        )
    ]


def _padding(misses):
    advice = (
        "pad to the size after the arrow; unused entries of a vocabulary, units and "
        "channels do no harm"
    )
    longer = any(miss.role == "sequence length" for miss in misses)
    return advice + ("; a sequence's padding must be masked" if longer else "")


def _describe(miss, required):
    size = miss.padded if required else miss.best
    where = miss.layers[0]
    more = f" and {len(miss.layers) - 1} more" if len(miss.layers) > 1 else ""
    return f"{miss.role} {miss.size} -> {size} in {where}{more}"


def data_format(
    facts: model_facts.ModelFacts, situation: estimates.Situation
) -> list[Finding]:
    """Convolutions whose channels come first, which no device's kernels want."""
    if situation.device.kind == "TPU":  # XLA lays out arrays by itself there.
        return []
    found = [
        layer
        for layer in facts.layers
        if layer.data_format == "channels_first" and layer.products
    ]
    paths = {layer.path for layer in found}
    share = situation.share(facts, lambda product: product.layer in paths)
    if share < format_rules.NOTICEABLE:
        return []
    if situation.device.kind == "CPU":
        evidence = (
            "oneDNN's kernels want channels_last: a network of three convolutions in "
            "bfloat16 was measured 3 times slower with channels_first, and slower than "
            "in float32 (2 cores of an AMD EPYC)"
        )
    else:
        evidence = (
            "Tensor Cores work on channels_last; the other way is transposed (NVIDIA, "
            "Convolutional Layers User's Guide), at the borders of neighboring "
            "convolutions at least, if XLA or Grappler changes the layout between them"
        )
    return [
        Finding(
            "data_format",
            "speed",
            share,
            f"{len(found)} convolutions have their channels first",
            f"{percent(share)} of the products' time: "
            f"{format_rules.examples([x.path for x in found])}; {evidence}",
            "use data_format='channels_last'",
            tuple({"layer": layer.path} for layer in found),
        )
    ]


def batch(
    facts: model_facts.ModelFacts, situation: estimates.Situation
) -> list[Finding]:
    """Steps too small to fill the device, or to pay for casting the weights."""
    narrow = estimates.narrow_dtype(facts)
    if narrow is None or not facts.flops or not situation.support(narrow).fast:
        return []
    if situation.device.kind == "CPU":
        return _batch_on_cpu(facts, situation)
    if situation.subject.peaks is None:
        return []
    return _launches(facts, situation) or _memory_bound(facts, situation)


def _launches(facts, situation):
    """A heuristic: launching the kernels takes longer than their products."""
    # XLA fuses what stands between products into about one kernel for each.
    fused = 2 * sum(product.calls for product in facts.products)
    kernels = min(fused, facts.kernels) if situation.jit_compile else facts.kernels
    launch = kernels * _LAUNCH_SECONDS
    work = _work(facts, situation)
    if work >= launch:
        return []
    grown = (2**power for power in range(1, 16))
    growth = next((g for g in grown if _work(facts, situation, g) >= launch), None)
    larger = f"a batch of {growth * facts.batch_size}" if growth else "a larger model"
    return [
        Finding(
            "batch",
            "speed",
            1.0 - work / (launch + work),
            f"too little work for this device in a batch of {facts.batch_size}",
            f"the {kernels} kernels of a forward pass take about "
            f"{_micro(launch)} to launch (5 µs each, a rule of thumb), their work "
            f"{_micro(work)} at the peak rates: no format can make that faster",
            f"{larger} fills it"
            + ("; XLA launches fewer kernels" if _may_use_xla(situation) else ""),
        )
    ]


def _may_use_xla(situation):
    possible = situation.xla_possible and situation.graph_rewrite is None
    return possible and not situation.jit_compile


def _work(facts, situation, grown=1):
    products = estimates.roofline(facts.products, situation, grown).seconds
    return products + grown * situation.other_seconds(facts)


def _micro(seconds):
    return f"{1e6 * seconds:,.0f} µs" if seconds >= 1e-6 else "less than 1 µs"


def _memory_bound(facts, situation):
    """Operations per byte are fewer than the device needs to be busy (roofline)."""
    now = estimates.roofline(facts.products, situation)
    if now.lost < _LOST:
        return []
    peaks = situation.subject.peaks
    ratio = 1e3 * peaks.half / peaks.bandwidth
    batches = [2**power for power in range(1, _LARGEST_GROWTH.bit_length())]
    growth = next(
        (
            grown
            for grown in batches
            if estimates.roofline(facts.products, situation, grown).lost < _LOST
        ),
        None,
    )
    if growth:
        what = f"a batch of {facts.batch_size} is too small for this device"
        advice = f"a batch of {growth * facts.batch_size} would do"
    else:
        what = "the layers are too narrow for this device"
        advice = (
            "no batch size changes that: expect at most the halved memory traffic, 2 "
            "times float32's speed. Wider layers gain more"
        )
    return [
        Finding(
            "batch",
            "speed",
            now.lost,
            what,
            f"at the peak rates {percent(now.lost)} of the products' time is spent on "
            f"moving their data: the device does {ratio:.0f} operations in the time of "
            "a byte (NVIDIA, GPU Performance Background User's Guide, 3)",
            advice,
        )
    ]


def _batch_on_cpu(facts, situation):
    few = [p for p in facts.products if p.weights and p.m < _FEW_ROWS]
    share = situation.share(facts, lambda product: product in few)
    if share >= 0.5:
        rows = max(product.m for product in few)
        evidence = (
            f"{percent(share)} of the operations multiply {rows} rows or fewer by "
            "weights that are cast from float32 each step; measured on 2 cores of an "
            "AMD EPYC with layers of 1024 units: 0.9 times float32's speed with 1 to 4 "
            "rows, 1.7 times from 16 on"
        )
    elif facts.flops < _LITTLE_WORK:
        share = 1.0 - facts.flops / _LITTLE_WORK
        evidence = (
            f"{count(facts.flops)}FLOP in a forward pass: starting the operations "
            "takes the time. Measured on 2 cores of an AMD EPYC with layers of 256 "
            "units: 1.07 times float32's speed with 13 MFLOP, 1.2 times with 50 MFLOP"
        )
    else:
        return []
    growth = max(_FEW_ROWS / min((p.m for p in few), default=_FEW_ROWS), 1)
    growth = max(growth, _LITTLE_WORK / facts.flops)
    return [
        Finding(
            "batch",
            "speed",
            share,
            f"too little work in a batch of {facts.batch_size}",
            evidence,
            f"16 bits pay from a batch of about "
            f"{alignment.pad(int(growth * facts.batch_size), 8)} on",
        )
    ]


RULES = (align, data_format, batch)
