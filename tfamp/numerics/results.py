"""What `compare_precision` and `search_precision` return: data, text, pictures."""

from typing import Any, NamedTuple

from tfamp import tables
from tfamp.numerics import statistics, verdict
from tfamp.precision import described


class CallPrecision(NamedTuple):
    """One call of a layer, or of an operation of a functional model.

    An error is the norm of the difference from float32 over the norm in float32. It is
    0 for empty values, and infinite where 16 bits are not finite but float32 is.

    Attributes:
      path: As `describe_layers` gives it.
      call: Index of the call of that layer, from 0.
      format: The compute dtype.
      input_error: Error of the inputs.
      accumulated_error: Error of the outputs, including that of all earlier layers.
      local_error: Error of the layer alone: in 16 bits, on float32's inputs.
      gradient_error: Error of the gradients of its weights and inputs; None without a
        loss.
      local_gradient_error: Error of its backward pass alone: in 16 bits, on float32's
        inputs and gradients.
      outputs: How the format represents float32's outputs.
      weights: How the format represents its weights.
      gradients: How the format represents the gradients of its outputs, times the loss
        scale.
      weight_gradients: The same for the gradients of its weights.
    """

    path: str
    call: int
    format: str
    input_error: float
    accumulated_error: float
    local_error: float
    gradient_error: float | None
    local_gradient_error: float | None
    outputs: statistics.Counts
    weights: statistics.Counts
    gradients: statistics.Counts | None
    weight_gradients: statistics.Counts | None

    @property
    def name(self) -> str:
        """The path, with the number of the call if it is not the first."""
        return f"{self.path} (call {self.call + 1})" if self.call else self.path

    @property
    def error(self) -> float:
        """The larger of both local errors."""
        return max(self.local_error, self.local_gradient_error or 0.0)


class PrecisionComparison(NamedTuple):
    """A model in 16 bits compared with float32, call by call.

    Attributes:
      model: Name of the model.
      mode: The mode, or "as it is".
      jit_compile: Whether XLA compiled the model.
      loss_scale: The loss scale in 16 bits; None without a loss.
      recommended_loss_scale: `statistics.recommended_loss_scale` of its gradients; None
        without a loss, or where no layer computes in float16.
      notes: Remarks on this host.
      rows: Calls in the order in which they end.
      layers: Result of `describe_layers` while the mode is assigned.
    """

    model: str
    mode: str
    jit_compile: bool
    loss_scale: float | None
    recommended_loss_scale: float | None
    notes: tuple[str, ...]
    rows: tuple[CallPrecision, ...]
    layers: tuple[described.LayerPrecision, ...] = ()

    @property
    def first_overflow(self) -> CallPrecision | None:
        """The first call that returns inf or NaN where float32 is finite."""
        return next((row for row in self.rows if row.outputs.overflow), None)

    @property
    def first_diverging(self) -> CallPrecision | None:
        """The first call with an input error below 0.1 and an output error over 0.5."""
        return next(
            (
                row
                for row in self.rows
                if row.input_error < verdict.SOUND
                and not row.accumulated_error <= verdict.DIVERGED
            ),
            None,
        )

    @property
    def verdict(self) -> str:
        """Where it goes wrong first and what helps, or how accurate it is."""
        return verdict.describe(self)

    # These five are those of `PrecisionSearch`, too: `self` is either.

    def to_dict(self: Any) -> dict[str, Any]:
        """Returns plain data for JSON; an infinite error is "inf"."""
        return {"schema_version": 1} | tables.plain(self)

    def to_text(self: Any) -> str:
        """Returns the summary, and all rows, for a terminal."""
        return tables.report(self._lines(), self._tables())

    __str__ = to_text

    def to_markdown(self: Any) -> str:
        """Returns the same as Markdown."""
        return tables.report(self._lines(), self._tables(), self._title)

    def __repr__(self: Any):
        """Returns the summary, with the rows that lose most."""
        return tables.report(*self._summary())

    def _repr_markdown_(self: Any):
        """Returns the same, as notebooks show it."""
        return "##" + tables.report(*self._summary(), self._title)

    def _summary(self):
        rows, notes = tables.largest(self.rows, "calls with the largest local errors")
        return [*self._lines(), *notes], self._tables(rows)

    def figure(self) -> Any:
        """Returns a matplotlib figure of the errors of each call, on a log scale."""
        names = [row.name for row in self.rows]
        bars = {
            "local error": [row.local_error for row in self.rows],
            "accumulated error": [row.accumulated_error for row in self.rows],
        }
        if self.loss_scale is not None:
            bars["local error of gradients"] = [
                row.local_gradient_error for row in self.rows
            ]
        from tfamp.numerics import plots

        return plots.errors(names, bars, self._title)

    @property
    def _title(self):
        return f"{self.model}: {self.mode} against float32"

    def _lines(self):
        compiled = "compiled by XLA" if self.jit_compile else "without XLA"
        yield self.verdict
        yield f"{self._title}, the same weights, {compiled}"
        yield from self.notes
        if self.loss_scale is not None:
            advice = self.recommended_loss_scale
            yield f"loss scale: {self.loss_scale:g}" + (
                f", recommended {advice:g}" if advice else ""
            )

    def _tables(self, shown=None):
        header = ["call", "format", "error in", "error out", "local error"]
        header += ["overflow", "to 0", "subnormal"]
        gradients = self.loss_scale is not None
        if gradients:
            header += ["gradients", "local", "overflow", "to 0"]
        rows = []
        for row in self.rows if shown is None else shown:
            errors = [row.input_error, row.accumulated_error, row.local_error]
            cells = [row.name, row.format, *map(tables.number, errors)]
            cells += _shares(row.outputs, "overflow", "underflow", "subnormal")
            if gradients:
                errors = [row.gradient_error, row.local_gradient_error]
                cells += map(tables.number, errors)
                cells += _shares(row.gradients, "overflow", "underflow")
            rows.append(cells)
        yield header, rows


def _shares(counts, *kinds):
    return [tables.share(getattr(counts, kind), counts.values) for kind in kinds]


class LayerSensitivity(NamedTuple):
    """The effect on a model of computing one layer alone in 16 bits.

    Attributes:
      path: Path of the layer.
      output_error: Norm of the outputs' difference from float32 over their norm.
      gradient_error: The same for the gradients of the weights; None without a loss.
      time: Time of a batch relative to float32; None where the mode is emulated.
    """

    path: str
    output_error: float
    gradient_error: float | None
    time: float | None

    @property
    def error(self) -> float:
        """The larger of both errors."""
        return max(self.output_error, self.gradient_error or 0.0)


class Choice(NamedTuple):
    """A choice of layers that stay in float32, with its error and its time.

    Attributes:
      label: "all float32", all of the mode, or how many layers stay.
      kept: Paths of the layers that stay in float32.
      output_error: As in `LayerSensitivity`, of the whole model.
      gradient_error: As in `LayerSensitivity`.
      time: As in `LayerSensitivity`.
    """

    label: str
    kept: tuple[str, ...]
    output_error: float
    gradient_error: float | None
    time: float | None

    error = LayerSensitivity.error


class PrecisionSearch(NamedTuple):
    """The layers that must stay in float32 for a model to meet a tolerance.

    Attributes:
      model: Name of the model.
      mode: The mode.
      tolerance: The largest error allowed.
      overrides: {pattern: "float32"} of the layers that must stay, for `enable` or
        `set_precision`; "mixed_bfloat16" in float8. Empty if none must.
      held_out: The choice, measured on batches that the search did not use.
      layers: The layers that were tried, in the model's order.
      frontier: The choices that were tried, from all in 16 bits.
      complete: Whether the search finished in time. If not, `overrides` is the best
        choice so far.
      notes: Remarks on this host.
    """

    model: str
    mode: str
    tolerance: float
    overrides: dict[str, str]
    held_out: Choice
    layers: tuple[LayerSensitivity, ...]
    frontier: tuple[Choice, ...]
    complete: bool
    notes: tuple[str, ...]

    @property
    def wide(self) -> str:
        """The format of the layers that must stay."""
        return "bfloat16" if self.mode == "float8" else "float32"

    @property
    def passed(self) -> bool:
        """Whether the choice is within the tolerance on the held-out batches."""
        return self.held_out.error <= self.tolerance

    to_dict = PrecisionComparison.to_dict
    to_text = __str__ = PrecisionComparison.to_text
    to_markdown = PrecisionComparison.to_markdown
    __repr__ = PrecisionComparison.__repr__
    _repr_markdown_ = PrecisionComparison._repr_markdown_

    @property
    def _title(self):
        return f"{self.model}: layers that must stay in {self.wide} in {self.mode}"

    def _summary(self):
        layers, notes = tables.largest(self.layers, "layers with the largest errors")
        return [*self._lines(), *notes], self._tables(layers)

    def figure(self) -> Any:
        """Returns a matplotlib figure of the error of each choice against its time."""
        from tfamp.numerics import plots

        points = [(x.label, x.error, x.time) for x in self.frontier]
        return plots.frontier(points, self.tolerance, f"{self.model}: {self.mode}")

    def _lines(self):
        paths = ", ".join(self.held_out.kept)
        what = f"keep {paths}" if paths else "no layer needs to stay"
        yield f"{self.model}: in {self.mode} {what} in {self.wide}"
        verdict = "within" if self.passed else "above"
        yield (
            f"on held-out batches the error is {tables.number(self.held_out.error)}, "
            f"{verdict} the tolerance of {self.tolerance:g}"
        )
        if not self.complete:
            yield "the time limit ended the search early: this is the best so far"
        yield from self.notes

    def _tables(self, layers=None):
        choices = [*self.frontier, self.held_out]
        layers = self.layers if layers is None else layers
        yield (
            ["choice", "outputs", "gradients", "time / float32's"],
            [[x.label, *_cells(x)] for x in choices],
        )
        if layers:
            yield (
                [f"{self.mode} in this layer alone", "outputs", "gradients", "time"],
                [[x.path, *_cells(x)] for x in layers],
            )


def _cells(row):
    time_ratio = "-" if row.time is None else f"{row.time:.2f}"
    errors = row.output_error, row.gradient_error
    return [*map(tables.number, errors), time_ratio]
