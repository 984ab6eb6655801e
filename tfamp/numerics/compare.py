"""`compare_precision`: where 16 bits lose what float32 computes, call by call."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp import hardware, modes
from tfamp.numerics import calls, report, statistics
from tfamp.precision import assign, borders, plan, policy
from tfamp.precision import overrides as overriding

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
      gradients: What becomes of the gradients that it passes on, times the loss scale.
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

    @property
    def name(self) -> str:
        """The path, with the number of the call if it is not the first."""
        return f"{self.path} (call {self.call + 1})" if self.call else self.path


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
    """

    model: str
    mode: str
    jit_compile: bool
    loss_scale: float | None
    recommended_loss_scale: float | None
    notes: tuple[str, ...]
    rows: tuple[CallPrecision, ...]

    @property
    def first_overflow(self) -> CallPrecision | None:
        """The first call that returns inf or NaN where float32 is finite."""
        return next((row for row in self.rows if row.outputs.overflow), None)

    @property
    def first_diverging(self) -> CallPrecision | None:
        """The first call that is given an error below 0.1 and returns one above 0.5."""
        found = (
            row
            for row in self.rows
            if row.input_error < SOUND and not row.accumulated_error <= DIVERGED
        )
        return next(found, None)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON; an infinite error is "inf"."""
        return {"schema_version": 1} | report.plain(self)

    def to_text(self) -> str:
        """Returns the table, and what it says, for a terminal."""
        return "\n".join([*self._lines(), "", report.text_table(*self._table())])

    def to_markdown(self) -> str:
        """Returns the same in Markdown."""
        title = f"# {self.model}: {self.mode} beside float32"
        lines = "\n".join(f"- {line}" for line in self._lines())
        return f"{title}\n\n{lines}\n\n{report.markdown_table(*self._table())}"

    def figure(self) -> Any:
        """Returns a matplotlib figure: both errors of each call, on a log scale."""
        names = [row.name for row in self.rows]
        bars = {
            "local error": [row.local_error for row in self.rows],
            "accumulated error": [row.accumulated_error for row in self.rows],
        }
        if self.loss_scale is not None:
            found = [row.local_gradient_error for row in self.rows]
            bars["local error of gradients"] = found
        from tfamp.numerics import plots

        return plots.errors(names, bars, f"{self.model}: {self.mode} beside float32")

    def __str__(self) -> str:
        return self.to_text()

    def _lines(self):
        compiled = "compiled by XLA" if self.jit_compile else "without XLA"
        yield f"{self.model}: {self.mode} beside float32, the same weights, {compiled}"
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

    def _table(self):
        header = ["call", "format", "error in", "error out", "local error"]
        header += ["overflow", "to 0", "subnormal"]
        gradients = self.loss_scale is not None
        if gradients:
            header += ["gradients", "local", "overflow", "to 0"]
        rows = []
        for row in self.rows:
            errors = [row.input_error, row.accumulated_error, row.local_error]
            cells = [row.name, row.format, *map(report.number, errors)]
            found = row.outputs
            lost = [found.overflow, found.underflow, found.subnormal]
            cells += [report.share(count, found.values) for count in lost]
            if gradients:
                errors = [row.gradient_error, row.local_gradient_error]
                found = row.gradients
                cells += map(report.number, errors)
                lost = [found.overflow, found.underflow]
                cells += [report.share(count, found.values) for count in lost]
            rows.append(cells)
        return header, rows


class _Pass(NamedTuple):
    """A call in one format: tensors of a graph, or their values."""

    taken: list  # What it computes from.
    made: list  # What it computes.
    upstream: list  # Gradients of `made`; empty without a loss.
    passed: list  # Gradients of `taken` and of its weights.
    local: list  # The same, by its own backward pass.


def compare_precision(
    model: keras.Model,
    inputs: Any,
    mode: str | None = None,
    *,
    targets: Any = None,
    loss: Callable[[Any, Any], Any] | str | None = None,
    loss_scale: float | None = None,
    jit_compile: bool = False,
) -> PrecisionComparison:
    """Finds where a mode loses what float32 computes, for each call of each layer.

    The same weights are run twice, by assignment: in float32, and in the mode as
    `set_precision` would give it. Then each layer runs once more in the mode on what
    float32 gave it, which shows the error that it makes itself; with a loss, its
    backward pass, too. Inference: no dropout, no new statistics. A layer that only
    calls others, or returns what it is given, has no row; one with operations of its
    own has a row for those. What runs inside a loop, as the cell of a recurrent layer,
    belongs to the layer around it.

    Args:
      model: A built model of any kind; its precision, weights, optimizer and random
        state are afterwards as before.
      inputs: A batch, structured as the model takes it.
      mode: "mixed_bfloat16" or "mixed_float16"; None: the precision that it has.
      targets: Targets of the batch, for the loss.
      loss: Function of (targets, outputs in float32), a Keras loss or its name; by
        default the compiled one if `targets` are given.
      loss_scale: What the loss is multiplied by in 16 bits; by default what the
        model's optimizer scales it by, else 1.
      jit_compile: Whether XLA compiles both.

    Returns:
      A `PrecisionComparison`.

    Raises:
      TypeError: If `model` is no Keras model.
      ValueError: If it is not built; if the mode is not one of 16 bits; if the
        float32 pass itself makes NaN; if there are targets, but no loss.

    Example:
      print(tfamp.compare_precision(model, x, "mixed_float16"))
    """
    assign.check_built(model)
    chosen = None if mode is None else modes.get_mode(mode)
    low = {place.layer.compute_dtype for place in assign.walk(model)} & {*assign.LOW}
    if chosen:
        low = {chosen.compute_format} & {*assign.LOW}
    if not low:
        raise ValueError(
            f"Nothing to compare with float32: {model.name!r} is asked to be in 32 "
            f"bits. Received: mode={mode!r}. Pass 'mixed_bfloat16' or 'mixed_float16'."
        )
    inputs = keras.tree.map_structure(as_float32, inputs)
    objective = None
    if targets is not None or loss is not None:
        objective = objective_of(model, inputs, targets, loss)
    scale = _scale_of(model) if loss_scale is None else loss_scale
    with assign.EXCLUSIVE:
        with assign.assigned_float32(model):
            exact, paths = _run_exact(model, inputs, objective, jit_compile)
        _check_finite(exact, paths)
        with assigned(model, chosen):
            rows = _run_low(model, inputs, objective, scale, exact, paths, jit_compile)
    return PrecisionComparison(
        model=model.name,
        mode=chosen.name if chosen else "as it is",
        jit_compile=jit_compile,
        loss_scale=scale if objective else None,
        recommended_loss_scale=_recommended(exact, rows) if objective else None,
        notes=tuple(_notes(low)),
        rows=tuple(rows),
    )


@contextlib.contextmanager
def assigned(
    model: keras.Model, mode: modes.Mode | None, overrides: Mapping[str, str] = {}
) -> Iterator[None]:
    """Scopes what `set_precision` would give a model; a mode of None: what it has."""
    if mode is None:
        yield
        return
    asked = plan.Plan(model, overriding.parse(mode, overrides))
    policies = {key: name for key, (name, _) in asked.complete(mode).items()}
    with policy.policy_scope(mode.policy), assign.assign(model, policies):
        yield


def as_float32(x: Any) -> tf.Tensor:
    """Returns a tensor, in float32 if it is of floats."""
    tensor = tf.convert_to_tensor(x)
    return tf.cast(tensor, "float32") if tensor.dtype.is_floating else tensor


def objective_of(model, inputs, targets, loss):
    """Returns a function from a model's outputs to the loss, a scalar.

    Raises:
      ValueError: If there is no loss.
    """
    if loss is None:
        if not model.compiled:
            raise ValueError(
                f"`targets` need a loss, and {model.name!r} is not compiled. Pass "
                "`loss`, a function of (targets, outputs)."
            )
        return lambda outputs: model.compute_loss(inputs, targets, outputs)
    function = keras.losses.get(loss)
    return lambda outputs: tf.reduce_mean(function(targets, outputs))


def _scale_of(model):
    optimizer = model.optimizer if model.compiled else None
    return float(keras.ops.convert_to_numpy(getattr(optimizer, "dynamic_scale", 1.0)))


def _recorded(model, inputs, objective, scale, note, chosen):
    """Runs a model and its loss; returns the calls that `chosen` takes, and `note`s."""
    with tf.GradientTape() as tape:
        recorder = calls.Recorder(model, tape if objective else None)
        with recorder.installed():
            outputs = model(inputs, training=False)
            if objective:
                value = objective(borders.widened(outputs)) * scale
        with tape.stop_recording():
            own = list(filter(chosen, recorder.calls))
            sources = [(x.made, x.taken, x.weights) for x in own]
    gradients = [([], [], [])] * len(own)
    if objective:
        gradients = tape.gradient(value, sources, None, tf.UnconnectedGradients.ZERO)
    with recorder.installed():
        noted = [note(recorder, *each) for each in zip(own, gradients, strict=True)]
    return own, noted


def _computes(call):
    """Whether a call has a row; float32 tells, where no cast is in between."""
    return call.made and not call.only_chains


def _backward(recorder, call, taken, upstream):
    """Makes a call again; returns its results, and its gradients given their own."""
    with tf.GradientTape() as tape:
        tape.watch(taken)
        made = recorder.again(call, taken)
    if not upstream:
        return made, []
    sources = [*taken, *call.weights]
    zero = tf.UnconnectedGradients.ZERO
    return made, tape.gradient(made, sources, upstream, zero)


def _run_exact(model, inputs, objective, jit_compile):
    """Returns values of the float32 pass, a `_Pass` for each call, and the paths."""
    paths = []

    def note(recorder, call, gradients):
        upstream, *passed = map(list, gradients)
        passed = [_dense(x) for each in passed for x in each]
        _, local = _backward(recorder, call, call.taken, upstream)
        local = [_dense(x) for x in local]
        return _Pass(call.taken, call.made, upstream, passed, local)

    def run(inputs):
        own, noted = _recorded(model, inputs, objective, 1.0, note, _computes)
        paths.extend((call.path, call.number) for call in own)
        return noted

    return tf.function(run, autograph=False, jit_compile=jit_compile)(inputs), paths


def _run_low(model, inputs, objective, scale, exact, paths, jit_compile):
    """Returns the rows: the pass in 16 bits beside the float32 values of each call."""
    owners = []

    def chosen(call):
        return (call.path, call.number) in known_paths

    known_paths = set(paths)

    def run(inputs, exact):
        known = dict(zip(paths, exact, strict=True))

        def note(recorder, call, gradients):
            wide = known[call.path, call.number]
            upstream, *passed = gradients
            passed = [_dense(x) for each in passed for x in each]
            taken = _cast_as(wide.taken, call.taken)
            scaled = [x * scale for x in wide.upstream]
            made, local = _backward(
                recorder, call, taken, _cast_as(scaled, call.made) if scaled else []
            )
            errors = [
                statistics.relative_error(call.taken, wide.taken),
                statistics.relative_error(call.made, wide.made),
                statistics.relative_error(made, wide.made),
            ]
            counts = [
                statistics.count_lost(call.made, wide.made),
                statistics.count_lost(*_cast_weights(call)),
            ]
            if scaled:
                unscaled = [tf.cast(x, "float32") / scale for x in passed]
                alone = [tf.cast(_dense(x), "float32") / scale for x in local]
                errors.append(statistics.relative_error(unscaled, wide.passed))
                errors.append(statistics.relative_error(alone, wide.local))
                larger = [x * scale for x in wide.passed]
                counts.append(statistics.count_lost(passed, larger))
            return tf.stack(errors), tf.stack(counts)

        own, noted = _recorded(model, inputs, objective, scale, note, chosen)
        owners.extend(own)
        return noted

    # The calls are counted before `run` reads their values.
    found = tf.function(run, autograph=False, jit_compile=jit_compile)(inputs, exact)
    rows = []
    for call, (errors, counts) in zip(owners, found, strict=True):
        errors = [*errors.numpy().tolist(), None, None][:5]
        counts = [*(statistics.Counts(*x) for x in counts.numpy().tolist()), None][:3]
        rows.append(
            CallPrecision(call.path, call.number, _format(call), *errors, *counts)
        )
    return rows


def _dense(gradient):
    return tf.convert_to_tensor(gradient)  # Of an embedding's rows, too.


def _cast_as(values, like):
    return [tf.cast(x, y.dtype) for x, y in zip(values, like, strict=True)]


def _cast_weights(call):
    wide = [tf.cast(weight, "float32") for weight in call.weights]
    low = getattr(call.owner, "compute_dtype", "float32")
    return [tf.cast(x, low) for x in wide], wide


def _format(call):
    layer = isinstance(call.owner, keras.layers.Layer)
    return call.owner.compute_dtype if layer else call.made[0].dtype.name


def _check_finite(exact, paths):
    for (path, _), call in zip(paths, exact, strict=True):
        for what, values in (("outputs", call.made), ("gradients", call.passed)):
            if any(bool(tf.reduce_any(tf.math.is_nan(x))) for x in values):
                raise ValueError(
                    f"The {what} of {path!r} have NaN in float32 already, so precision "
                    "is not the cause. Look for bad values in the data or the weights, "
                    "a division by 0, or a logarithm of 0."
                )


def _recommended(exact, rows):
    largest = 0.0
    for call, row in zip(exact, rows, strict=True):
        if row.format == "float16":
            found = [float(tf.reduce_max(tf.abs(x))) for x in call.passed if tf.size(x)]
            largest = max([largest, *found])
    return statistics.recommended_loss_scale(largest)


def _notes(formats):
    for low in sorted(formats):
        support = hardware.format_support(low, hardware.read_devices())
        if not support.fast:
            yield f"{low} is not fast here: {support.reason}"
