"""What an audit says of the launches of a step: pure functions of their counts.

A launch took one NVIDIA H200 20 to 26 us of a step, its small kernel included, some 16
of them: BERT-Base, a step of 7,682 launches in 185 ms, of 8,081 in 213 ms, and of 8,201
in 160 ms, in 131 of which the GPU was busy (results/gpu/report.md).
"""

from typing import NamedTuple

from tfamp import tables
from tfamp.diagnostics.findings import Finding
from tfamp.diagnostics.rules import TrainingStep
from tfamp.facts import devices
from tfamp.inspect.launches import PARTS, Launches

MICROSECONDS = 25
# A backward pass multiplies twice as often as a forward pass.
_PASSES = 3


class StepCost(NamedTuple):
    """What a step costs by each of the limits, in milliseconds.

    Attributes:
      launches: At `MICROSECONDS` each.
      arithmetic, memory: At the device's peaks; None where they are not known.
    """

    launches: float
    arithmetic: float | None = None
    memory: float | None = None

    @property
    def is_launch_bound(self) -> bool:
        """Whether launches take longer than arithmetic and memory together."""
        if self.arithmetic is None or self.memory is None:
            return False
        return self.launches > self.arithmetic + self.memory


def cost(step: TrainingStep, launches: Launches) -> StepCost:
    """Returns what a step with such launches costs on its device."""
    work = 2 * _PASSES * step.multiplications
    shares = {name: work * share for name, share in step.formats().items()}
    least = devices.seconds(step.device, shares, launches.moved)
    times = {name: 1e3 * each for name, each in least.items()}
    return StepCost(1e-3 * MICROSECONDS * launches.total, **times)


def describe(launches: Launches, costs: StepCost) -> tuple[list[str], str]:
    """Returns sentences about the launches of a step, and a table of them."""
    # One program, or several around calls.
    is_whole = list(launches.parts) != list(PARTS)
    about = "about " if is_whole and launches.total > 1 else ""
    said = (
        f"Launches of a step: {about}{launches.total:,}, {_ms(costs.launches)} at "
        f"{MICROSECONDS} us each, as measured with one H200."
    )
    if is_whole:
        said += " XLA makes one program of the step, a graph of kernels"
        said += ", with convolutions in between." if launches.total > 1 else "."
    if costs.arithmetic is not None:
        said += f" At the device's peaks arithmetic takes {_ms(costs.arithmetic)}"
        if costs.memory is not None:
            said += f", and what the launches read and write {_ms(costs.memory)}"
        said += "."
    if is_whole:
        return [said], ""
    rows = {
        **launches.parts,
        "step": launches.total,
        "casts in it": launches.casts,
        "graphs of XLA in it": launches.graphs,
        "copies to the host": launches.copies,
    }
    shown = [[name, f"{number:,}"] for name, number in rows.items()]
    return [said], tables.table(("part", "launches"), shown, markdown=True)


def _ms(time):
    return f"{time:,.1f} ms" if time >= 1 else f"{time:.2g} ms"


def findings(
    step: TrainingStep,
    launches: Launches,
    costs: StepCost,
    clusters: bool,
    refused: list,
) -> list[Finding]:
    """Returns what follows from the launches of a step, or keeps XLA from joining them.

    Args:
      step: The step.
      launches, costs: Its launches, and what they cost.
      clusters: Whether `enable` has updates and small operators compiled.
      refused: Kinds of operators that XLA does not compile.
    """
    if step.jit_compile and refused:
        return [
            Finding(
                *("xla", 1.0, f"XLA does not compile {', '.join(refused)}"),
                "it compiles a step as a whole, or not at all",
                "compile(jit_compile=False), or do without these operators",
            )
        ]
    if step.jit_compile or not costs.is_launch_bound:
        return []
    advice = ["a larger batch has as many launches, and more work in each"]
    if step.allows_xla and not refused:
        advice.insert(0, "compile(jit_compile=True): XLA makes one program of the step")
    if not clusters:
        advice.insert(
            0,
            "tfamp.enable(), in a mode but float32 or with fused_kernels=True, makes "
            "one program of the update and few of the small operators",
        )
    part, most = max(launches.parts.items(), key=lambda each: each[1])
    saves = f"; {step.narrow} saves memory, and no launch" if step.narrow else ""
    return [
        Finding(
            *("launch_bound", 1.0),
            f"{launches.total:,} launches of small kernels take longer than the "
            "arithmetic",
            f"{_ms(costs.launches)} for {_ms(costs.arithmetic)} of arithmetic and "
            f"{_ms(costs.memory)} of memory; the largest part is {part}, "
            f"{most:,}{saves}",
            f"{'; '.join(advice)}. steps_per_execution saves none",
        )
    ]
