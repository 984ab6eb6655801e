"""Rules on what computes in which format: pure functions of facts.

Each takes (facts, situation) and returns a list of findings, empty if all is well.
"""

from typing import NamedTuple

from tfamp import hardware, modes
from tfamp.diagnostics import audit_report, estimates, model_facts

NOTICEABLE = 0.02  # A smaller share of the time is not reported.
_LARGE_OUTPUT = 0.1  # Of the time: smaller output layers are meant to be in float32.
_NOTICEABLE_CASTS = 0.1  # Of all elements written: every mixed model has some.
_EXAMPLES = 5

Finding = audit_report.Finding
percent = audit_report.percent


def fast_unit(
    facts: model_facts.ModelFacts, situation: estimates.Situation
) -> list[Finding]:
    """The format of most products has no fast unit here, or a fast one is not used."""
    narrow = estimates.narrow_dtype(facts)
    best = hardware.choose_mode([situation.device])
    if narrow is None:
        return _float32_model(facts, situation, best)
    support = situation.support(narrow)
    if not support.fast:
        runs = "is not fast" if support.supported else "does not run"
        share = facts.flops_by_dtype().get(narrow, 0) / max(1, facts.flops)
        return [
            Finding(
                "fast_unit",
                "speed",
                1.0,
                f"{narrow} {runs} on this device",
                f"{support.reason}; {percent(share)} of the operations are in {narrow}",
                f"use {best.mode!r} here ({best.reason})",
            )
        ]
    if not facts.flops and facts.all_counted:
        return [
            Finding(
                "fast_unit",
                "speed",
                1.0,
                "no matrix product or convolution was found",
                f"only those run on the fast {narrow} unit; the rest moves fewer bytes",
                "expect little from 16 bits in this model",
            )
        ]
    return []


def _float32_model(facts, situation, best):
    if best.mode == "float32" or not facts.flops or situation.graph_rewrite:
        return []
    narrow = modes.get_mode(best.mode).compute_format
    now = sum(map(situation.seconds, facts.products))
    then = facts.flops / situation.rate(narrow)
    return [
        Finding(
            "fast_unit",
            "speed",
            max(0.0, 1.0 - then / now),
            f"all products are in float32, though {best.mode} is fast here",
            best.reason,
            f"build the model after tfamp.enable({best.mode!r})",
        )
    ]


def tf32(
    facts: model_facts.ModelFacts, situation: estimates.Situation
) -> list[Finding]:
    """Float32 products run without TF32 where the device has it."""
    if situation.tensor_float_32 or not situation.support("tf32").supported:
        return []
    share = situation.share(facts, lambda product: product.dtype == "float32")
    if share < NOTICEABLE:
        return []
    return [
        Finding(
            "tf32",
            "speed",
            share * (1.0 - situation.rate("float32") / situation.rate("tf32")),
            "TF32 is off",
            f"{percent(share)} of the products' time is in float32, and the device has "
            f"{situation.support('tf32').reason}",
            "use mode 'tf32', or a mixed mode, which leaves it on; keep it off only "
            "where float32's 24 bits are needed",
        )
    ]


def islands(
    facts: model_facts.ModelFacts, situation: estimates.Situation
) -> list[Finding]:
    """Layers, or operations in 16-bit layers, whose products are in float32."""
    narrow = estimates.narrow_dtype(facts)
    if narrow is None or not situation.support(narrow).fast:
        return []
    # Of layers without a noticeable share nothing would be gained.
    apart = {
        layer.path: situation.share(facts, lambda x, y=layer: _is_island(x, y))
        for layer in facts.layers
    }
    found = [x for x in facts.layers if apart[x.path] >= _ISLANDS[_kind(x)].least]
    return [
        _island_finding(kind, layers, apart, facts, narrow)
        for kind in _ISLANDS
        if (layers := [x for x in found if _kind(x) == kind])
    ]


def _is_island(product, layer):
    return product.layer == layer.path and product.dtype in ("float32", "float64")


def _kind(layer):
    if layer.compute_dtype in model_facts.NARROW:
        return "tied" if layer.ties_output else "operations"
    return "output" if layer.is_output else "layers"


class _Island(NamedTuple):
    """What a kind of island is, what to do, and the least share that is told."""

    what: str
    advice: str
    least: float = NOTICEABLE


_ISLANDS = {
    "layers": _Island(
        "float32 layers in a {narrow} model",
        "take them out of the overrides, or drop their dtype='float32', unless their "
        "accuracy needs it",
    ),
    "output": _Island(
        "a large output layer in float32",
        "compute its product in {narrow} and cast the logits: Dense(...), then "
        "Activation('linear', dtype='float32'); softmax and loss stay float32",
        _LARGE_OUTPUT,
    ),
    "tied": _Island(
        "an output layer in float32 that is tied to its embedding",
        "its `embeddings` are float32 unless the embedding's `reverse_dtype` says "
        "otherwise: set reverse_dtype='{narrow}', and cast the logits to float32 after",
        _LARGE_OUTPUT,
    ),
    "operations": _Island(
        "float32 products in {narrow} layers",
        "cast the operands to the layer's `compute_dtype`; NumPy constants and casts "
        "in a `call` of your own are the usual cause",
    ),
}


def _island_finding(kind, layers, share, facts, narrow):
    what, advice, _ = _ISLANDS[kind]
    layers = sorted(layers, key=lambda layer: -share[layer.path])
    details = [
        {
            "layer": layer.path,
            "share_of_time": share[layer.path],
            "share_of_operations": sum(
                x.flops for x in layer.products if _is_island(x, layer)
            )
            / facts.flops,
        }
        for layer in layers
    ]
    operations = sum(row["share_of_operations"] for row in details)
    total = sum(row["share_of_time"] for row in details)
    names = [f"{x['layer']} ({percent(x['share_of_operations'])})" for x in details]
    return Finding(
        "float32_islands",
        "speed",
        total,
        what.format(narrow=narrow),
        f"{percent(operations)} of the operations, about {percent(total)} of the "
        f"products' time: {examples(names)}",
        advice.format(narrow=narrow),
        tuple(details),
    )


def element_wise(
    facts: model_facts.ModelFacts, situation: estimates.Situation
) -> list[Finding]:
    """Element-wise work in float32 where 16 bits would move half the bytes.

    On GPUs only: on the CPU measured, sums and activations in bfloat16 take longer than
    in float32. What normalization and softmax do in 16-bit layers is meant, and left
    out; what a float32 layer at an output does, too, and islands, which are told.
    """
    narrow = estimates.narrow_dtype(facts)
    if narrow is None or situation.device.kind != "GPU" or not facts.elements:
        return []
    told = {row["layer"] for x in islands(facts, situation) for row in x.details}
    found = [
        layer
        for layer in facts.layers
        if layer.float32_elements and _is_avoidable(layer, told)
    ]
    share = sum(layer.float32_elements for layer in found) / facts.elements
    effect = share * situation.other_share(facts) / 2
    if effect < NOTICEABLE:
        return []
    found.sort(key=lambda layer: -layer.float32_elements)
    names = [
        f"{layer.path} ({percent(layer.float32_elements / facts.elements)})"
        for layer in found
    ]
    return [
        Finding(
            "element_wise",
            "speed",
            effect,
            f"element-wise work in float32 in a {narrow} model",
            f"{percent(share)} of the elements that are not products' results: "
            f"{examples(names)}",
            "; ".join(
                text
                for models, text in _ELEMENT_WISE.items()
                if models in {layer.is_model for layer in found}
            ),
            tuple(
                {"layer": layer.path, "elements": layer.float32_elements}
                for layer in found
            ),
        )
    ]


def _is_avoidable(layer, told):
    if layer.is_model:
        return True
    is_float32 = layer.compute_dtype == "float32" and not layer.is_output
    return is_float32 and layer.path not in told


# Whether it is a model's own work -> what to do about it.
_ELEMENT_WISE = {
    True: "a sum of a float32 and a 16-bit tensor is float32: cast the float32 side, "
    "for example the model's input",
    False: "take float32 layers out of the overrides, or drop their dtype='float32', "
    "unless their accuracy needs it",
}


def casts(
    facts: model_facts.ModelFacts, situation: estimates.Situation
) -> list[Finding]:
    """Casts of activations where layers of different dtypes meet."""
    if estimates.narrow_dtype(facts) is None:
        return []
    outputs = {layer.path for layer in facts.layers if layer.is_output}
    # Into 16 bits at the input and out of them at the output: that must be.
    found = [x for x in facts.casts if x.source != "input" and x.target not in outputs]
    elements = sum(cast.elements for cast in found)
    share = elements / facts.elements if facts.elements else 0.0
    effect = share * situation.other_share(facts)
    if share < _NOTICEABLE_CASTS or effect < NOTICEABLE:
        return []
    found.sort(key=lambda cast: -cast.elements)
    names = [
        f"{x.source} -> {x.target} ({x.source_dtype} to {x.target_dtype})"
        for x in found
    ]
    return [
        Finding(
            "casts",
            "speed",
            effect,
            f"{len(found)} casts between layers of different dtypes",
            f"{percent(share)} of the elements that are not products' results, and as "
            f"many in the backward pass: {examples(names)}",
            "give neighbors the same dtype: a float32 layer between 16-bit ones costs "
            "two casts",
            tuple(cast._asdict() for cast in found),
        )
    ]


def examples(names: list[str]) -> str:
    """Returns at most five names as one phrase."""
    more = len(names) - _EXAMPLES
    return ", ".join(names[:_EXAMPLES]) + (f", and {more} more" if more > 0 else "")


RULES = (fast_unit, tf32, islands, element_wise, casts)
