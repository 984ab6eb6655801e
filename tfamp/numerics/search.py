"""`search_precision`: which layers must stay in float32, and what that costs."""

import itertools
import math
import statistics as python_statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfamp import checks, progress, tables
from tfamp.facts import formats, modes
from tfamp.graph_rewrite import switch
from tfamp.inspect import calls, model_inputs, quantized, structure
from tfamp.numerics import backward, compare, results, statistics
from tfamp.operators import promotion
from tfamp.precision import assigned, conversion, plan, policy, settings
from tfamp.precision import overrides as overriding

_FEWEST, _MOST = 4, 16  # Batches that are looked at.


def search_precision(
    model: keras.Model,
    data: Iterable[Any],
    mode: str = "auto",
    *,
    tolerance: float = 0.1,
    seconds: float = 600.0,
    loss: Callable[[Any, Any], Any] | str | None = None,
    loss_scale: float | None = None,
    verbose: int = 1,
) -> results.PrecisionSearch:
    """Finds the fewest layers that must stay in float32 for a mode to compute rightly.

    For "float8", those that must stay in bfloat16.

    ```
    error: norm of the difference from float32 over the norm in float32; of the outputs
      and, with a loss, of the gradients of all weights; the larger counts
    all layers in 16 bits: within the tolerance, so no layer must stay
    else each layer alone in 16 bits: its error, and its time
    keep the layers of the largest errors, more and more, until within the tolerance
    give back, the smallest error first, each layer that is not needed for it
    judge on batches that were held out
    ```
    Never by the loss, which an error may lower. Layers of equal errors are ranked by
    time: what gains least in 16 bits is kept first.

    Args:
      model: A built model of any kind; afterwards as before.
      data: Batches, at least 4, of which up to 16 are looked at, the last quarter held
        out: inputs, or with a loss (inputs, targets).
      mode: "mixed_bfloat16", "mixed_float16", "float8", or "auto": what `enable` would
        choose.
      tolerance: The error that is allowed.
      seconds: When to stop with the best so far.
      loss: Function of (targets, outputs in float32), a Keras loss or its name; by
        default the compiled one if there are targets.
      loss_scale: What the loss is multiplied by in the mode; by default what the
        model's optimizer scales it by.
      verbose: 1: a line on each trial and the minutes left, on standard error; 0: none.

    Returns:
      A `PrecisionSearch`; `set_precision(model, mode, found.overrides)` applies it.

    Raises:
      TypeError: If `model` is no Keras model.
      ValueError: If it is not built, the mode is float32, there are fewer than 4
        batches, or float32 itself makes NaN.

    Example:
      found = tfamp.search_precision(model, dataset.take(8), "mixed_float16")
      tfamp.enable("mixed_float16", overrides=found.overrides)
    """
    structure.check_built(model)
    checks.check_real("tolerance", tolerance)
    checks.check_real("seconds", seconds)
    if tolerance < 0:
        raise ValueError(
            f"`tolerance` must not be negative. Received: tolerance={tolerance}."
        )
    is_auto = isinstance(mode, str) and mode == "auto"
    chosen = settings.resolve_mode(mode)[0] if is_auto else modes.get_mode(mode)
    batches = [_inputs_and_targets(x) for x in _first(data)]
    inputs, targets = batches[0]
    with progress.Progress(verbose, f"comparing {model.name!r} with float32"):
        # Checks the model and its float32 pass, and says what computes in 16 bits.
        comparison, seen = compare.compare(
            model, inputs, chosen.name, targets, loss, loss_scale
        )
    with (
        switch.paused(),
        quantized.calibrated(seen),
        progress.Progress(verbose, seconds=seconds) as lines,
    ):
        search = _Search(
            model, chosen, batches, comparison, loss, tolerance, seconds, lines
        )
        choices, layers, best, complete = search.run()
    return results.PrecisionSearch(
        model=model.name,
        mode=chosen.name,
        tolerance=tolerance,
        overrides={
            overriding.pattern_of(model, path): search.wide for path in best.kept
        },
        held_out=best,
        layers=tuple(layers),
        frontier=tuple(choices),
        complete=complete,
        notes=comparison.notes,
    )


def _inputs_and_targets(batch):
    inputs, targets, _ = keras.utils.unpack_x_y_sample_weight(batch)
    model_inputs.check_batch("data", inputs)
    return keras.tree.map_structure(compare.as_float32, inputs), targets


def _first(data):
    # The rows of an array are no batches.
    if not isinstance(data, Iterable) or hasattr(data, "shape"):
        raise TypeError(
            "`data` must be batches: a tf.data.Dataset, or a list of (inputs, targets) "
            f"or of inputs. Received: {type(data).__name__}."
        )
    batches = list(itertools.islice(iter(data), _MOST))
    if len(batches) < _FEWEST:
        raise ValueError(
            f"`data` must have at least {_FEWEST} batches, of which one is held out. "
            f"Received: {len(batches)}."
        )
    return batches


_FAILED = (math.inf, None, None)


class _TimeIsOverError(Exception):
    pass


class _Search:
    """The trials of one search; each assigns, traces and puts back."""

    def __init__(
        self, model, mode, batches, comparison, loss, tolerance, seconds, lines
    ):
        self._model, self._mode, self._loss, self._lines = model, mode, loss, lines
        self._scale, self._tolerance = comparison.loss_scale, tolerance
        self._deadline = time.monotonic() + seconds
        count = max(1, len(batches) // 4)
        self._seen, self._held_out = batches[:-count], batches[-count:]
        self._timed = not comparison.notes  # Of an emulated mode, no times.
        # What a layer has that must not be in the mode.
        self.wide = mode.policy if mode.product_format else "float32"
        low = (mode.product_format,) if mode.product_format else formats.LOW
        paths = {x.path for x in comparison.rows if x.format in low}
        self._paths = [place.path for place in structure.walk(model)]
        overrides = overriding.parse(mode, self._overrides(paths))
        self._traced = conversion.traced(model, mode, batches[0][0])
        can = plan.Plan(model, mode, overrides).matched
        self._rows = [
            x for x in comparison.rows if not x.call and self._only(x.path) in can
        ]
        self._units = [x.path for x in self._rows]
        with assigned.float32(model):
            self._exact = self._step(None if self._scale is None else 1.0)
            self._exact(*batches[0])

    def run(self):
        """Returns (choices, sensitivities, the best on held-out batches, complete)."""
        zero = None if self._scale is None else 0.0
        one = 1.0 if self._timed else None
        choices = [results.Choice("all float32", tuple(self._units), 0.0, zero, one)]
        layers, complete = [], True
        try:
            if self.wide != "float32":
                choices = [self._choose(self._units)]
            choices.append(self._choose(()))
            if choices[-1].error > self._tolerance:
                for row in self._rows:
                    layers.append(self._alone(row))
                choices += self._narrowed(sorted(layers, key=_rank))
        except _TimeIsOverError:
            complete = False
        within = [x for x in choices if x.error <= self._tolerance]
        # Of float8, all layers in bfloat16 may be beyond it, too.
        best = min(within or choices[:1], key=lambda x: len(x.kept))
        self._deadline = math.inf
        measurement = self._try(
            "on held-out batches", self._overrides(best.kept), self._held_out
        )
        held_out = results.Choice("held out", best.kept, *measurement)
        return choices, layers, held_out, complete

    def _alone(self, row):
        label = f"only {row.path} in {self._mode.name}"
        others = self._overrides(set(self._units) - {row.path})
        measurement = self._try(
            label, others | {self._only(row.path): self._mode.name}, self._seen
        )
        if measurement is _FAILED:  # What the layer itself does is known.
            measurement = row.local_error, row.local_gradient_error, None
        return results.LayerSensitivity(row.path, *measurement)

    def _narrowed(self, order):
        """Yields choices: more and more layers, then without those not needed."""
        paths = [x.path for x in order if x.error > self._tolerance]
        rest = [x.path for x in order if x.path not in paths]
        while True:
            if paths:
                yield (choice := self._choose(paths))
                if choice.error <= self._tolerance:
                    break
            if not rest:
                return
            more = max(1, len(paths) // 2)
            paths, rest = paths + rest[:more], rest[more:]
        for path in reversed(paths):
            fewer = [x for x in paths if x != path]
            if fewer:
                yield (choice := self._choose(fewer))
                if choice.error <= self._tolerance:
                    paths = fewer

    def _choose(self, paths):
        label = f"{len(paths)} in {self.wide}" if paths else f"all {self._mode.name}"
        measurement = self._try(label, self._overrides(paths), self._seen)
        return results.Choice(label, tuple(paths), *measurement)

    def _overrides(self, paths):
        return {self._only(path): self.wide for path in sorted(paths)}

    def _only(self, path):
        return overriding.exact(path, self._paths)

    def _try(self, label, overrides, batches):
        """Returns the largest errors on the batches, and the time over float32's."""
        if time.monotonic() > self._deadline:
            raise _TimeIsOverError
        with self._lines.part(label):
            outputs, gradients, ratio = found = self._measure(overrides, batches)
        error = tables.number(max(outputs, gradients or 0.0))
        spent = f", {ratio:.2f} of float32's time" if ratio else ""
        self._lines.result(f"error {error}{spent}")
        return found

    def _measure(self, overrides, batches):
        entries = overriding.parse(self._mode, overrides)
        planned = plan.Plan(self._model, self._mode, entries, self._traced)
        with assigned.assigned(self._model, planned):
            step = self._step(self._scale)
            try:
                step(*batches[0])
            except (TypeError, ValueError, tf.errors.InvalidArgumentError):
                return _FAILED  # A `call` that sixteen bits end.
            pairs = [(self._run_exact(x), _timed(step, *x)) for x in batches]
        errors = [
            [float(error) for error in map(statistics.relative_error, low, exact)]
            for (_, exact), (_, low) in pairs
        ]
        outputs, gradients = map(max, zip(*errors, strict=True))
        ratio = python_statistics.median(low / exact for (exact, _), (low, _) in pairs)
        return (
            outputs,
            None if self._scale is None else gradients,
            ratio if self._timed else None,
        )

    def _run_exact(self, batch):
        with policy.policy_scope("float32"):  # TF32 is off while it computes, too.
            return _timed(self._exact, *batch)

    def _step(self, scale):
        """Returns a function of (inputs, targets): outputs and unscaled gradients."""
        model, variables = self._model, self._model.trainable_variables
        weights = [v.value for v in variables if calls.is_trained(v)]

        def step(inputs, targets):
            with calls.Unwritten(), tf.GradientTape() as tape:
                outputs = promotion.widened(model(inputs, training=False))
                if scale is not None:
                    objective = compare.objective_of(model, inputs, targets, self._loss)
                    value = objective(outputs) * scale
            gradients = []
            if scale is not None:
                gradients = backward.gradients(tape, value, weights)
            unscaled = [tf.cast(x, "float32") / scale for x in gradients]
            return calls.floats(outputs), unscaled

        return tf.function(step, autograph=False, reduce_retracing=True)


def _timed(step, *batch):
    start = time.perf_counter()
    result = step(*batch)
    tf.test.experimental.sync_devices()
    return time.perf_counter() - start, result


def _rank(layer):
    """Larger errors first; among equal ones, what gains least in 16 bits."""
    return -float(f"{layer.error:.1e}"), -(layer.time or 1.0)
