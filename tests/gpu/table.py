"""Prints what tfamp's steps ask of a GPU beside stock Keras', and the goals.

    python tests/gpu/table.py
    python tests/gpu/table.py --layers=2 --only="BERT|MLP" --modes=mixed_bfloat16

On the stand-in, so that it needs no GPU. Each figure is of a process of its own; all
take an hour on two cores, most of it XLA's with 12 layers.
"""

import argparse
import json
import pathlib
import re
import sys
import tempfile
from typing import Any, NamedTuple

import stand_in

MEASURE = str(pathlib.Path(__file__).with_name("measure.py"))
MODES = "mixed_bfloat16", "mixed_float16", "tf32"
MODELS = "bert", "resnet50", "efficientnet", "unet", "lstm", "mlp"


class Case(NamedTuple):
    """A process to run: its model, and what of `measure.py` is asked for."""

    model: str = "bert"
    xla: bool = False
    fit: bool = False
    again: bool = False  # In a second process, with the caches of the first.


class Row(NamedTuple):
    """A row: its figure, the goal in each of `MODES`, and whether it is a goal.

    Where there are several cases, the figure is the largest of them.
    """

    title: str
    cases: tuple[Case, ...]
    figure: str
    goals: tuple[float, float, float]
    kept: bool = True


BERT, XLA, AGAIN = Case(), Case(xla=True), Case(xla=True, again=True)
# Each as large as a step of BERT-Base, 32 x 384, unless the title has another.
ROWS = (
    Row("launches without XLA", (BERT,), "launches", (800, 900, 750)),
    Row("kernels, library calls and nodes", (BERT,), "work", (1700, 1900, 1600)),
    Row("copies to the host without XLA", (BERT,), "copies_to_host", (4, 5, 4)),
    Row("launches with XLA", (XLA,), "launches", (2, 4, 2)),
    Row("calls of ptxas in XLA's first step", (XLA,), "ptxas", (40, 50, 40)),
    Row("CPU s of the first step", (BERT,), "first_step_cpu_s", (40, 45, 40), False),
    Row("the same with XLA", (XLA,), "first_step_cpu_s", (60, 70, 60), False),
    Row("in a second process", (AGAIN,), "first_step_cpu_s", (35, 40, 35), False),
    Row(
        "compilations of a fit with partial last batches (one layer)",
        (Case("bert", xla=True, fit=True),),
        "compilations",
        (2, 2, 2),
    ),
    Row("ResNet-50: launches", (Case("resnet50"),), "launches", (1850, 2100, 1700)),
    Row(
        "EfficientNetB0: launches",
        (Case("efficientnet"),),
        "launches",
        (2000, 2200, 1850),
    ),
    Row("U-Net: launches", (Case("unet"),), "launches", (700, 800, 660)),
    Row("2 LSTM of 512: launches", (Case("lstm"),), "launches", (150, 170, 130)),
    Row("MLP of 5 layers: launches", (Case("mlp"),), "launches", (120, 140, 110)),
    Row(
        "the allocator's peak by stock's, the most of all",
        tuple(map(Case, MODELS)),
        "peak",
        (1.02, 1.02, 1.02),
    ),
)


class Figures:
    """Runs what a row asks for, once each, and keeps it."""

    def __init__(self, layers, caches):
        self.layers, self.caches = layers, caches
        self.found: dict[str, Any] = {}

    def of(self, case, mode, side):
        """Returns a case's figures, or {"failed": why}."""
        given = [f"--model={case.model}", f"--mode={mode}", f"--layers={self.layers}"]
        # Stock Keras with XLA takes a minute a layer.
        if case.model == "bert" and case.xla and (case.fit or side == "stock"):
            given[-1] = "--layers=1"
        given += [f"--{x}" for x in ("xla", "fit") if getattr(case, x)]
        given += ["--tfamp"] * (side == "tfamp")
        name = " ".join([*given, "again"] if case.again else given)
        if name in self.found:
            return self.found[name]
        if case.again:
            self.of(case._replace(again=False), mode, side)
        cache = pathlib.Path(self.caches, re.sub(r"\W+", "_", " ".join(given)))
        cache.mkdir(exist_ok=True)
        print(f"{name} ...", file=sys.stderr, flush=True)
        caches = {"XDG_CACHE_HOME": str(cache)}
        try:
            done = stand_in.run(MEASURE, *given, timeout=900.0, **caches)
            found = done[case.model] | {"compilations": len(done["compiled"])}
        except RuntimeError as error:
            found = {"failed": str(error).splitlines()[-1]}
        print(f"  {json.dumps(found)}", file=sys.stderr, flush=True)
        self.found[name] = found
        return found

    def cell(self, row, mode):
        """Returns a row's text in a mode: figure, goal and stock's."""
        pairs = [
            [self.of(c, mode, side) for side in ("tfamp", "stock")] for c in row.cases
        ]
        if row.figure == "peak":
            ratios = [
                ours["peak_mib"] / stock["peak_mib"]
                for ours, stock in pairs
                if not {"failed"} & (ours.keys() | stock.keys())
            ]
            ours, stock = max(ratios, default=None), 1.0
        else:
            ours, stock = (x.get(row.figure) for x in pairs[0])
        goal = row.goals[MODES.index(mode)]
        missed = " missed" if row.kept and (ours is None or ours > goal) else ""
        return f"{_text(ours)}{missed} (goal {_text(goal)}, stock {_text(stock)})"


def _text(value):
    return (
        "failed"
        if value is None
        else f"{value:,.4g}"
        if value < 100
        else f"{value:,.0f}"
    )


def main():
    """Prints the table; what has run is told on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12, help="of BERT")
    parser.add_argument("--only", default="", help="pattern of rows' titles")
    parser.add_argument("--modes", default=",".join(MODES))
    options = parser.parse_args()
    if why := stand_in.missing():
        sys.exit(why)
    modes = options.modes.split(",")
    rows = [row for row in ROWS if re.search(options.only, row.title)]
    with tempfile.TemporaryDirectory() as caches:
        figures = Figures(options.layers, caches)
        head = f"BERT of {options.layers} layers, 32 x 384, unless said"
        lines = [f"| {' | '.join([head, *modes])} |", "|---" * (1 + len(modes)) + "|"]
        for row in rows:
            cells = [figures.cell(row, mode) for mode in modes]
            lines.append(f"| {' | '.join([row.title, *cells])} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
