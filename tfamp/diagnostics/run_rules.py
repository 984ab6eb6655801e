"""Rules on how the step runs, and on accuracy; pure functions of facts.

Each takes (facts, situation) and returns a list of findings, empty if all is well.
"""

from tfamp import formats, hardware
from tfamp.diagnostics import audit_report, estimates, format_rules, model_facts

Finding = audit_report.Finding
percent = audit_report.percent

# Of a step's time on a CPU: 1.5 times float32's speed without XLA, 0.9 times with it
# (medians of an MLP, a convolutional network and a transformer).
_XLA_ON_CPU = 1.0 - 0.9 / 1.5


def eager(
    facts: model_facts.ModelFacts, situation: estimates.Situation
) -> list[Finding]:
    """The step runs operation by operation."""
    if not facts.runs_eagerly:
        return []
    return [
        Finding(
            "eager",
            "speed",
            1.0,
            "the model was compiled with run_eagerly=True",
            "each operation is started by Python, which takes longer than most of them",
            "compile(run_eagerly=False)",
        )
    ]


def xla(facts: model_facts.ModelFacts, situation: estimates.Situation) -> list[Finding]:
    """XLA is on where it slows 16 bits down, or off where it helps."""
    narrow = estimates.narrow_dtype(facts)
    if situation.graph_rewrite:
        return _bypass(situation.graph_rewrite) if situation.jit_compile else []
    if narrow is None or facts.runs_eagerly or not situation.support(narrow).fast:
        return []
    if situation.device.kind == "CPU":
        return _xla_on_cpu(narrow) if situation.jit_compile else []
    if situation.device.kind != "GPU" or situation.jit_compile:
        return []
    if not situation.xla_possible:
        return []
    share = situation.other_share(facts)
    if share < format_rules.NOTICEABLE:
        return []
    return [
        Finding(
            "xla",
            "speed",
            share,
            "XLA is off",
            f"element-wise operations take about {percent(share)} of the time without "
            "fusion; XLA fuses them, and casts of weights, into the kernels around",
            "compile(jit_compile=True), unless the step has operations that XLA does "
            "not support",
        )
    ]


def _xla_on_cpu(narrow):
    return [
        Finding(
            "xla",
            "speed",
            _XLA_ON_CPU,
            "XLA is on, and slow with 16 bits on a CPU",
            f"XLA casts {narrow} back to float32 there: measured 0.9 times float32's "
            "speed with XLA, 1.3 to 1.7 times without (AMD EPYC with native bfloat16)",
            "compile(jit_compile=False)",
        )
    ]


def _bypass(dtype):
    return [
        Finding(
            "xla",
            "speed",
            1.0,
            f"XLA bypasses the graph rewrite to {dtype}",
            "what XLA compiles never passes TensorFlow's graph optimizer, and stays "
            "in float32",
            "compile(jit_compile=False)",
        )
    ]


def pipeline(
    facts: model_facts.ModelFacts, situation: estimates.Situation
) -> list[Finding]:
    """Drawing a batch takes longer than a step; needs both times."""
    draw, step = situation.pipeline_seconds, situation.step_seconds
    if draw is None or step is None or draw <= step:
        return []
    return [
        Finding(
            "pipeline",
            "speed",
            1.0 - step / draw,
            "training waits for its input",
            f"a batch takes {1e3 * draw:.1f} ms to draw, a step "
            f"{1e3 * step:.1f} ms: no format can make that faster",
            "cache(), map(num_parallel_calls=tf.data.AUTOTUNE), then batch before map, "
            "and prefetch(tf.data.AUTOTUNE) last",
            ({"pipeline_seconds": draw, "step_seconds": step},),
        )
    ]


def loss_scaling(
    facts: model_facts.ModelFacts, situation: estimates.Situation
) -> list[Finding]:
    """Float16 layers train by an optimizer that does not scale the loss."""
    found = [x.path for x in facts.layers if x.compute_dtype == "float16" and x.trains]
    if situation.graph_rewrite == "float16":
        found.append("what the graph rewrite takes")
    if facts.scales_loss is not False or not found:
        return []
    tiny = formats.float_format("float16").smallest_subnormal
    return [
        _accuracy(
            "loss_scaling",
            "float16 layers train without loss scaling",
            f"gradients below {tiny / 2:.1e} become 0 in: "
            f"{format_rules.examples(found)}",
            "compile after tfamp.enable(), or wrap the optimizer by "
            "tfamp.wrap_optimizer",
            found,
        )
    ]


def narrow_variables(
    facts: model_facts.ModelFacts, situation: estimates.Situation
) -> list[Finding]:
    """Variables of 16 bits lose updates."""
    found = [layer for layer in facts.layers if layer.narrow_variables]
    if not found:
        return []
    dtype = found[0].variable_dtype
    half = formats.float_format(dtype).epsilon / 2
    scalars = sum(layer.narrow_variables for layer in found)
    paths = [layer.path for layer in found]
    return [
        _accuracy(
            "narrow_variables",
            f"{scalars:,} trained weights are stored in {dtype}",
            f"an update of less than {half:.1e} of its weight (half an epsilon of "
            f"{dtype}) is rounded away: {format_rules.examples(paths)}",
            f"use {_mode_instead(dtype, situation)!r}, which stores weights in float32",
            paths,
        )
    ]


def _mode_instead(dtype, situation):
    """The mode with float32 weights: of the same format where that is fast."""
    if situation.support(dtype).fast:
        return f"mixed_{dtype}"
    return hardware.choose_mode([situation.device]).mode


def bias_gradients(
    facts: model_facts.ModelFacts, situation: estimates.Situation
) -> list[Finding]:
    """Bias gradients that TensorFlow sums in bfloat16 on a CPU without XLA."""
    if situation.device.kind != "CPU" or situation.jit_compile:
        return []
    if situation.bias_gradient_fixed:
        return []
    # Equal terms stop counting at 2 / epsilon; half of that shows already.
    enough = 1.0 / formats.float_format("bfloat16").epsilon
    found = [x for x in facts.layers if x.bias_rows >= enough and x.trains]
    if not found:
        return []
    names = [f"{layer.path} ({layer.bias_rows:,} rows)" for layer in found]
    return [
        _accuracy(
            "bias_gradients",
            "bias gradients are summed in bfloat16",
            f"{format_rules.examples(names)}; BiasAddGrad of TensorFlow 2.21 keeps "
            "its sum in bfloat16 on a CPU: 4096 ones make 256, and errors of 70 to 92% "
            "were measured with 4096 rows",
            "train under tfamp.enable(), which sums them rightly",
            [layer.path for layer in found],
        )
    ]


def outputs(
    facts: model_facts.ModelFacts, situation: estimates.Situation
) -> list[Finding]:
    """Outputs, their softmax, or the loss, in 16 bits."""
    found = {}
    for output in facts.outputs:
        if output.activation_dtype in model_facts.NARROW:
            found[output.layer] = f"{output.activation} in {output.activation_dtype}"
        elif output.dtype in model_facts.NARROW:
            found[output.layer] = output.dtype
    names = [f"{layer} ({dtype})" for layer, dtype in found.items()]
    if facts.loss_dtype in model_facts.NARROW:
        names.append(f"the loss ({facts.loss_dtype})")
    if not names:
        return []
    return [
        _accuracy(
            "outputs",
            "outputs are not in float32",
            f"{format_rules.examples(names)}: logarithms and sums of the loss start "
            "from rounded values",
            "dtype='float32' for the output layer, or after a large one "
            "Activation('linear', dtype='float32')",
            list(found),
        )
    ]


def _accuracy(rule, what, evidence, advice, paths):
    details = tuple({"layer": path} for path in paths)
    return Finding(rule, "accuracy", None, what, evidence, advice, details)


SPEED_RULES = (eager, xla, pipeline)
ACCURACY_RULES = (narrow_variables, loss_scaling, bias_gradients, outputs)
