"""The parts of the benchmark's page that are folded: its making, and its words."""

from collections.abc import Sequence

from tfamp import formats
from tfamp.benchmark import page_markup as markup
from tfamp.benchmark import records, words

_GLOSSARY = {
    "speed-up": (
        "How many times as fast a step is as tfamp's float32 without XLA, for the same "
        "task and batch size: the median over the repeats. 2x means half the time; "
        "below 1x is slower."
    ),
    "float32": (
        "Numbers of 32 bits with about 7 decimal digits: what networks are trained in "
        "unless one asks for something else."
    ),
    "bfloat16": (
        "Numbers of 16 bits with the range of float32 and 2 to 3 decimal digits. They "
        "halve the memory of what is computed and need no loss scale."
    ),
    "float16": (
        "Numbers of 16 bits with 3 to 4 decimal digits and a small range: nothing "
        "above {largest:,.0f}, and small gradients become 0. It needs a loss scale."
    ),
    "TF32": (
        "A way in which newer NVIDIA GPUs multiply float32 matrices: the operands are "
        "rounded to 3 to 4 decimal digits, everything else stays float32."
    ),
    "mixed precision": (
        "Most of the work in 16 bits, the weights and what is delicate in float32."
    ),
    "loss scale": (
        "A factor that the loss is multiplied with, so that small gradients do not "
        "become 0 in float16. It is divided out before the weights are changed."
    ),
    "skipped step": (
        "A step whose gradients were too large for float16. The weights stay as they "
        "were, the loss scale is lowered. A few at the start are normal."
    ),
    "XLA": (
        "TensorFlow's compiler. It joins operations, which saves time in a step and "
        "costs time before the first one."
    ),
    "graph rewrite": (
        "TensorFlow's own way to mixed precision: it changes the finished graph of a "
        "float32 model to 16 bits, operation by operation."
    ),
    "peak and roofline": (
        "The most operations a second that this machine reached in large matrix "
        "products. Work with few operations for each byte it reads cannot get there: "
        "its roof is the memory's speed. The roofline is the lower of both."
    ),
    "matrix work": (
        "The part of a step spent in matrix products and convolutions. A faster format "
        "speeds up mostly that part; the rest gains from smaller numbers and from "
        "kernels that join operations."
    ),
    "input share": (
        "Time to draw a batch over the time of a step. Near 100 % the input is the "
        "bottleneck, and no format can help."
    ),
    "quartiles": (
        "A quarter of all values lies below the first, a quarter above the third. They "
        "are written beside or below the median, the value in the middle."
    ),
    "95 % interval": (
        "Where the true difference lies, unless chance was unusually unkind. If 0 is "
        "in it, the difference may be chance."
    ),
}


def method(report: records.Report) -> list[markup.Markup]:
    """Returns how it was measured: notes in sight, the rest folded."""
    machine = report.machine
    facts = {
        "device": machine.get("device"),
        **machine.get("facts", {}),
        **{f"compared with {name}": text for name, text in report.peers.items()},
    }
    if report.clocks:
        facts["clocks"] = report.clocks
    command = markup.scrolled(
        "Command", markup.element("pre", markup.element("code", report.command))
    )
    parts = {
        "Command and settings": [command, _facts(report.settings)],
        "Machine and versions": [_facts(facts)],
        "What was in force, cell by cell": [_in_force(report)],
    }
    folds = [_fold(title, body) for title, body in parts.items() if any(body)]
    notes = [markup.prose(note) for note in report.notes]
    return [markup.items(notes), *folds]


def glossary() -> markup.Markup:
    """Returns what the page's words mean."""
    largest = formats.float_format("float16").max
    meanings = {name: text.format(largest=largest) for name, text in _GLOSSARY.items()}
    return _fold("What the words mean", [markup.pairs(meanings, "glossary")])


def _facts(values):
    return markup.pairs(values, "facts")


def _fold(title: str, body: Sequence[str]):
    head = markup.element("summary", markup.element("h3", title))
    return markup.element("details", head, *body)


def _in_force(report):
    """What was asked for and what ran, cell by cell."""
    lines = [
        {
            "cell": row.cell.label,
            "processes": words.count(row.repeats),
            "TF32": words.tensor_float_32(row, report.machine),
            "XLA": _xla(row),
            "note": row.note or words.NONE,
        }
        for row in report.rows
        if not row.failed
    ]
    if not lines:
        return markup.Markup()
    return markup.table("What was in force", "", lines, ["TF32", "XLA", "note"])


def _xla(row):
    asked = "asked for" if row.xla else "not asked for"
    if row.xla_in_force is None:
        return asked
    return f"{asked}, {'in force' if row.xla_in_force else 'not in force'}"
