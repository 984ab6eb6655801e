"""What `compare_precision` and `search_precision` return: data, text, pictures."""

from typing import Any, NamedTuple

from tfamp import tables
from tfamp.numerics import statistics
from tfamp.precision import described

# A call diverges that makes an error above the second out of one below the first.
SOUND, DIVERGED = 0.1, 0.5


class CallPrecision(NamedTuple):
    """One call of a layer, or of an operation of a functional model.

    An error is the norm of the difference from float32 over the norm in float32: 0 of
    nothing, infinite where 16 bits are not finite and float32 is.

    Attributes:
      path: As `describe_layers` gives it.
      call: Which call of that layer, from 0.
      format: The format that it computes in.
      input_error: Error of what it is given.
      accumulated_error: Error of what it returns, with that of all layers before.
      local_error: Its own: the layer in 16 bits, given what float32 computed.
      gradient_error: Error of the gradients that it passes on, of its weights' and of
        its inputs'; None without a loss.
      local_gradient_error: Its own: its backward pass in 16 bits, given float32's
        inputs and gradients.
      outputs: What becomes of float32's outputs.
      weights: What becomes of its weights when they are cast.
      gradients: What becomes of the gradients of its outputs, times the loss scale.
      weight_gradients: The same of its weights'.
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
        """The larger of both errors of its own."""
        return max(self.local_error, self.local_gradient_error or 0.0)


class PrecisionComparison(NamedTuple):
    """What `compare_precision` found.

    Attributes:
      model: The model's name.
      mode: The mode, or "as it is".
      jit_compile: Whether XLA compiled it.
      loss_scale: What the loss was multiplied by in 16 bits; None without a loss.
      recommended_loss_scale: `statistics.recommended_loss_scale` of its gradients; None
        without a loss, or where no layer computes in float16.
      notes: What to know of the host.
      rows: Calls in the order in which they end.
      layers: What `describe_layers` gives while the mode is assigned.
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
        """The first call that is given an error below 0.1 and returns one above 0.5."""
        diverging = (
            row
            for row in self.rows
            if row.input_error < SOUND and not row.accumulated_error <= DIVERGED
        )
        return next(diverging, None)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON; an infinite error is "inf"."""
        return {"schema_version": 1} | tables.plain(self)

    def to_text(self) -> str:
        """Returns the table, and what it says, for a terminal."""
        return tables.report(self._lines(), self._tables())

    __str__ = to_text

    def to_markdown(self) -> str:
        """Returns the same in Markdown."""
        return tables.report(self._lines(), self._tables(), self._title)

    def __repr__(self):
        """Returns the summary with the calls that lose most."""
        return tables.report(*self._summary())

    def _repr_markdown_(self):
        """Returns the same, as notebooks show it."""
        return "##" + tables.report(*self._summary(), self._title)

    def _summary(self):
        rows, notes = tables.largest(self.rows, "calls with the largest local errors")
        return [*self._lines(), *notes], self._tables(rows)

    def figure(self) -> Any:
        """Returns a matplotlib figure: both errors of each call, on a log scale."""
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
        return f"{self.model}: {self.mode} beside float32"

    def _lines(self):
        compiled = "compiled by XLA" if self.jit_compile else "without XLA"
        yield f"{self._title}, the same weights, {compiled}"
        yield from self.notes
        for what, row in (
            ("first overflow", self.first_overflow),
            ("first diverging", self.first_diverging),
        ):
            yield f"{what}: {row.name if row else 'none'}"
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
    """What 16 bits in one layer alone do to the model.

    Attributes:
      path: The layer's.
      output_error: Norm of the outputs' difference from float32's over their norm.
      gradient_error: The same of the weights' gradients; None without a loss.
      time: Time of a batch over float32's; None where the mode is emulated.
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
      output_error: As of a layer, of the whole model.
      gradient_error: As of a layer.
      time: As of a layer.
    """

    label: str
    kept: tuple[str, ...]
    output_error: float
    gradient_error: float | None
    time: float | None

    error = LayerSensitivity.error


class PrecisionSearch(NamedTuple):
    """What `search_precision` found.

    Attributes:
      model: The model's name.
      mode: The mode.
      tolerance: The error that was allowed.
      overrides: {pattern: "float32"}, for float8 "mixed_bfloat16", of the layers that
        must stay, for `enable` or
        `set_precision`; empty if none must.
      held_out: The choice on batches that the search did not see.
      layers: The layers that were tried, in the model's order.
      frontier: The choices that were tried on the way, from all in 16 bits.
      complete: Whether time sufficed. If not, `overrides` is the best so far.
      notes: What to know of the host.
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

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return {"schema_version": 1} | tables.plain(self)

    def to_text(self) -> str:
        """Returns the verdict, the choices and the layers, for a terminal."""
        return tables.report(self._lines(), self._tables())

    __str__ = to_text

    def to_markdown(self) -> str:
        """Returns the same in Markdown."""
        return tables.report(self._lines(), self._tables(), self._title)

    def __repr__(self):
        """Returns the summary with the choices and layers that lose most."""
        return tables.report(*self._summary())

    def _repr_markdown_(self):
        """Returns the same, as notebooks show it."""
        return "##" + tables.report(*self._summary(), self._title)

    @property
    def _title(self):
        return f"{self.model}: layers that must stay in {self.wide} in {self.mode}"

    def _summary(self):
        layers, notes = tables.largest(self.layers, "layers with the largest errors")
        return [*self._lines(), *notes], self._tables(layers)

    def figure(self) -> Any:
        """Returns a matplotlib figure: error against time of each choice."""
        from tfamp.numerics import plots

        points = [(x.label, x.error, x.time) for x in self.frontier]
        return plots.frontier(points, self.tolerance, f"{self.model}: {self.mode}")

    def _lines(self):
        kept = ", ".join(self.held_out.kept)
        what = f"keep {kept}" if kept else "no layer must stay"
        yield f"{self.model}: in {self.mode} {what} in {self.wide}"
        verdict = "within" if self.passed else "above"
        yield (
            f"on held-out batches the error is {tables.number(self.held_out.error)}, "
            f"{verdict} the tolerance of {self.tolerance:g}"
        )
        if not self.complete:
            yield "the time was over before the search was: the best so far"
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


def _cells(found):
    time_ratio = "-" if found.time is None else f"{found.time:.2f}"
    errors = found.output_error, found.gradient_error
    return [*map(tables.number, errors), time_ratio]
