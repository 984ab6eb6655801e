"""What an audit found, as plain data, and how it is shown."""

import shutil
import textwrap
from typing import Any, Literal, NamedTuple

SCHEMA_VERSION = 1
_MOST_COLUMNS = 100  # Longer lines are hard to read.
_TITLES = {
    "speed": "Speed: share of the step concerned (mending saves less), largest first",
    "accuracy": "Accuracy",
}


class Finding(NamedTuple):
    """One reason why training is slower, or less exact, than it could be.

    Attributes:
      rule: Name of the rule, e.g. "alignment".
      about: "speed" or "accuracy".
      effect: For speed: the share of a step's time that the finding touches, an
        estimated upper bound of what mending it can save. None for accuracy.
      what: What was found, in one phrase.
      evidence: The figures, and where they are from.
      advice: What to do.
      details: One dict of plain data for each layer or size, for programs.
    """

    rule: str
    about: Literal["speed", "accuracy"]
    effect: float | None
    what: str
    evidence: str
    advice: str
    details: tuple[dict[str, Any], ...] = ()


class AuditReport(NamedTuple):
    """Why a model does not train faster; `print` it.

    Attributes:
      model: The model's name.
      device: Name of the device that it was audited for.
      simulated: Whether this host does not have that device.
      batch_size: Examples in a batch.
      jit_compile: Whether the step is taken to be compiled by XLA.
      flops: Operations of the matrix products and convolutions of a forward pass.
      formats: Format -> share of those operations, largest first.
      findings: Those about speed by effect, then those about accuracy.
      notes: What was assumed.
    """

    model: str
    device: str
    simulated: bool
    batch_size: int
    jit_compile: bool
    flops: int
    formats: dict[str, float]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        findings = [
            {**finding._asdict(), "details": list(finding.details)}
            for finding in self.findings
        ]
        return {
            "schema_version": SCHEMA_VERSION,
            **self._asdict(),
            "formats": dict(self.formats),
            "findings": findings,
            "notes": list(self.notes),
        }

    def to_markdown(self) -> str:
        """Returns the report as Markdown, a table for each kind of finding."""
        lines = [f"# {self._title()}", "", f"{self._work()}.", ""]
        for about, found in self._sections():
            lines += [f"## {_TITLES[about]}", ""]
            lines += ["| | finding | evidence | what to do |", "|---|---|---|---|"]
            lines += [
                "| " + " | ".join(map(_cell, (_effect(x), *x[3:6]))) + " |"
                for x in found
            ]
            lines.append("")
        if not self.findings:
            lines += ["Nothing found.", ""]
        lines += [f"- {note}" for note in self.notes]
        return "\n".join(lines).rstrip() + "\n"

    def __str__(self) -> str:
        width = min(shutil.get_terminal_size((88, 24)).columns, _MOST_COLUMNS)
        lines = [*_wrap(self._title(), width), *_wrap(self._work(), width)]
        for about, found in self._sections():
            lines += ["", *_wrap(_TITLES[about], width)]
            for finding in found:
                lines += _entry(finding, width)
        if not self.findings:
            lines += ["", "Nothing found."]
        if self.notes:
            lines += ["", "Notes"]
            lines += [row for note in self.notes for row in _wrap(note, width, "  ")]
        return "\n".join(lines)

    def _title(self):
        simulated = ", simulated" if self.simulated else ""
        return (
            f"Audit of {self.model!r} on {self.device}{simulated}, "
            f"batch size {self.batch_size}, XLA {'on' if self.jit_compile else 'off'}"
        )

    def _work(self):
        formats = ", ".join(f"{name} {percent(s)}" for name, s in self.formats.items())
        done = f"{count(self.flops)}FLOP in matrix products of a forward pass"
        return f"{done}: {formats}" if formats else done

    def _sections(self):
        for about in _TITLES:
            found = [finding for finding in self.findings if finding.about == about]
            if found:
                yield about, found


def _entry(finding, width):
    """Lines of one finding: its effect in a column, the rest indented after it."""
    effect = f"{_effect(finding):>7}  "
    indent = " " * len(effect)
    return [
        *_wrap(finding.what, width, effect, indent),
        *_wrap(finding.evidence, width, indent),
        *_wrap(finding.advice, width, f"{indent}-> ", f"{indent}   "),
    ]


def _wrap(text, width, first="", rest=None):
    rest = first if rest is None else rest
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _effect(finding):
    return "" if finding.effect is None else percent(finding.effect)


def percent(share: float) -> str:
    """Returns a share for people: 0.123 -> "12%"."""
    if 0 < share < 0.0005:
        return "<0.1%"
    return f"{100 * share:.{0 if share >= 0.0995 else 1}f}%"


def count(number: float) -> str:
    """Returns a number with a prefix: 1234567 -> "1.2 M"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.1f} {prefix}"
    return f"{number} "


def _cell(text):
    return text.replace("|", "\\|")
