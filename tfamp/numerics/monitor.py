"""A Keras callback that counts, by layer, what underflows and overflows in 16 bits."""

import json
import pathlib
import re

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfamp import checks, tables
from tfamp.facts import formats, user_code
from tfamp.inspect import calls, structure
from tfamp.keras_patches import hooks
from tfamp.numerics import backward, monitored, statistics
from tfamp.operators import promotion
from tfamp.precision import assigned, model_hooks, overrides

_KINDS = ("outputs", "weights", "gradients", "weight_gradients")


class NumericsMonitor(keras.callbacks.Callback):
    """Measures what 16 bits lose in each layer, every `every` steps of `fit`.

    A step in 16 bits sees only the zeros that underflow leaves. A monitored step
    therefore computes its batch a second time, forward and backward, with the layers in
    float32 and the same dropout. It counts which of those values the format of each
    layer cannot represent. Training is not affected: weights, statistics, random states
    and the history are those of a run without the callback. It works in graphs,
    eagerly, under XLA, and under a strategy, whose replicas are counted together.

    Once a layer loses more than `max_lost` of its gradients, one warning names the
    layer that loses most, and the loss scale that would prevent it. At the end of `fit`
    it prints what the last monitored step lost, in words. With `log_dir` it writes
    `numerics.jsonl`, a line for each monitored step, and scalars for TensorBoard.

    Args:
      every: Int >= 1. Steps from one monitored step to the next, from the first step.
      layers: Regular expression that matches the whole path of layers in 16 bits.
      log_dir: Folder to write to; None writes nothing.
      max_lost: Share of a layer's gradients, 0 to 1, that may be lost without warning.
      verbose: 1 prints at the end of `fit`; 0 does not.

    Attributes:
      rows: A `statistics.LayerNumerics` for each layer, of the last monitored step;
        `print` a row.
      recommended_loss_scale: `statistics.recommended_loss_scale` of the largest
        gradient in float16 so far; None without any.
      fits: Whether the current loss scale is at most the recommended one; None without
        a gradient in float16.

    Raises:
      ValueError: If a setting is invalid.
      re.error: If `layers` is not a regular expression.

    Example:
      model.fit(x, y, callbacks=[tfamp.NumericsMonitor(every=100)])
    """

    def __init__(
        self,
        every: int = 100,
        layers: str = ".*",
        *,
        log_dir: str | None = None,
        max_lost: float = 0.05,
        verbose: int = 1,
    ):
        super().__init__()
        checks.check_count("every", every)
        checks.check_real("max_lost", max_lost)
        if not 0.0 <= max_lost <= 1.0:
            raise ValueError(
                "`max_lost` must be a share, in [0, 1]. Received: "
                f"max_lost={max_lost!r}."
            )
        try:
            self._pattern = re.compile(layers)
        except (re.error, TypeError) as error:
            raise ValueError(
                "`layers` must be a regular expression of layers' paths. Received: "
                f"layers={layers!r}: {error}."
            ) from error
        self.every, self.max_lost, self.verbose = every, max_lost, verbose
        self._folder = None if log_dir is None else pathlib.Path(log_dir)
        if self._folder and self._folder.is_file():
            raise ValueError(f"`log_dir` must be a folder. Received: file {log_dir!r}.")
        self.rows: tuple[statistics.LayerNumerics, ...] = ()
        self.recommended_loss_scale: float | None = None
        self.fits: bool | None = None

    # ---- In `fit` ----

    def on_train_begin(self, logs=None):
        """Discards the results of an earlier `fit`."""
        self._largest, self._warned, self._seen = 0.0, False, 0
        self._layers = []  # Each with its path and its format.
        self._failed, self._watching = False, False
        self._plain = self._function = None

    def on_train_end(self, logs=None):
        """Prints what was lost, or warns if there was no layer in 16 bits."""
        if self._failed:
            return
        if not self._layers:
            logging.warning("NumericsMonitor: no monitored layer computes in 16 bits.")
        elif self.verbose and self.rows:
            scale = (
                f"loss scale: {float(self._scale.numpy()):g}; "
                f"{self.recommended_loss_scale:g} would keep the largest finite"
                if self.recommended_loss_scale
                else ""
            )
            text = monitored.describe(self._lost(), self.max_lost, scale)
            print(f"NumericsMonitor, step {self._last}: {text}")

    def on_train_batch_begin(self, batch, logs=None):
        """Arranges for this step to be monitored if it is due."""
        # A model that has its precision by its first step is watched in the second.
        is_due = self._seen % self.every == 0 or (self._seen == 1 and not self._layers)
        self._seen += 1
        if self._failed or not is_due or not (self._layers or self._find_layers()):
            return
        variables = self.model.trainable_variables
        self._before = {id(v): tf.identity(v.value) for v in variables}
        self._watch_next_step()

    def on_train_batch_end(self, batch, logs=None):
        """Reads the results, writes them, and warns."""
        if not self._watching or self._failed:
            return
        self._watching, self._last = False, self._seen - 1
        self.rows = tuple(self._read())
        self._recommend()
        self._write()
        self._warn()

    def _find_layers(self):
        low = [
            x
            for x in structure.walk(self.model)
            if x.layer.compute_dtype in formats.LOW
            and overrides.matches(self._pattern, x.path)
        ]
        if not low or (self._seen == 1 and not model_hooks.has_its_plan(self.model)):
            return False
        self._layers = [(x.layer, x.path, x.layer.compute_dtype) for x in low]
        with self.model.distribute_strategy.scope():
            own = dict(
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
            shape = [len(self._layers), len(_KINDS), len(statistics.Counts._fields)]
            self._counts = tf.Variable(tf.zeros(shape, tf.int64), **own)
            self._magnitudes = tf.Variable(tf.zeros([len(self._layers)]), **own)
            self._scale = tf.Variable(1.0, **own)
        return True

    def _watch_next_step(self):
        """Puts a training function with the second pass in place, for one call."""
        model = self.model
        if model.train_function is not self._plain:  # Another precision, say.
            self._plain, self._function = model.train_function, None

        def train_function(iterator):
            watched = [(model, "train_step", self._watched(model.train_step))]
            model.train_function, self._watching = self._function, True
            try:
                with hooks.replaced(watched):
                    model.make_train_function()
                    logs = model.train_function(iterator)
                self._function = model.train_function
                return logs
            finally:
                model.train_function = self._plain

        model.train_function = train_function

    def _watched(self, step):
        def train_step(*args, **kwargs):
            measure = self._measure
            if tf.inside_function():  # A graph of its own, to leave out if it fails.
                measure = tf.function(measure, autograph=False)
            try:
                measure(*args, **kwargs)
            except Exception as error:  # Code of the user's may raise anything.
                self._failed = True
                logging.warning(
                    "NumericsMonitor cannot compute the loss of model %r a second "
                    "time, by `model(x)` and `compute_loss`; training continues "
                    "without it. Received: %s: %s",
                    *(self.model.name, type(error).__name__, str(error)[:300]),
                )
            return step(*args, **kwargs)

        return train_step

    def _measure(self, data):
        model = self.model
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        scale = tf.convert_to_tensor(getattr(model.optimizer, "dynamic_scale", 1.0))
        with _unsynchronized(model), assigned.float32(model), tf.GradientTape() as tape:
            recorder = calls.Recorder(model, tape)
            with recorder.installed(collect_losses=True):
                outputs = promotion.widened(model(x, training=True))
                loss = model.compute_loss(x, y, outputs, weight, training=True)
        own = [call for call in recorder.calls if not call.only_chains]
        sources = []
        for layer, *_ in self._layers:
            of_layer = [call for call in own if call.owner is layer]
            outputs = calls.floats([call.outputs for call in of_layer])
            sources.append((outputs, of_layer[0].weights if of_layer else []))
        gradients = backward.gradients(tape, loss, sources)
        rows, largest = [], []
        for (*_, low), (outputs, weights), (down, of_weights) in zip(
            self._layers, sources, gradients, strict=True
        ):
            scaled = [[x * scale for x in values] for values in (down, of_weights)]
            parts = [outputs, [tf.cast(w, "float32") for w in weights], *scaled]
            held = [[tf.cast(x, low) for x in values] for values in parts]
            rows.append(tf.stack([*map(statistics.count_lost, held, parts)]))
            sizes = [tf.reduce_max(tf.abs(x)) for x in (*down, *of_weights)]
            largest.append(tf.reduce_max(tf.stack([tf.constant(0.0), *sizes])))
        self._counts.assign(tf.stack(rows))
        self._magnitudes.assign(tf.stack(largest))
        self._scale.assign(tf.cast(scale, "float32"))

    # ---- What was found ----

    def _read(self):
        local = self.model.distribute_strategy.experimental_local_results
        counts = sum(each.numpy() for each in local(self._counts))
        largest = np.max([each.numpy() for each in local(self._magnitudes)], axis=0)
        lost = self._updates_lost()
        for (_, path, low), row, *others in zip(
            self._layers, counts.tolist(), largest.tolist(), lost, strict=True
        ):
            kinds = [statistics.Counts(*each) for each in row]
            if kinds[0].values:
                yield statistics.LayerNumerics(path, low, *kinds, *others)

    def _updates_lost(self):
        """Returns the share of each layer's updates that its format rounds away."""
        before = self._before  # Without what the first step itself has made.
        updates = [
            [(before[id(v)], v.value) for v in own if id(v) in before]
            for own in (structure.own_weights(layer) for layer, *_ in self._layers)
        ]
        formats = tuple(low for *_, low in self._layers)
        counts = statistics.count_rounded_away(updates, formats).numpy().tolist()
        return [lost / changed if changed else float("nan") for changed, lost in counts]

    def _recommend(self):
        largest = [x.largest_gradient for x in self.rows if x.format == "float16"]
        self._largest = max([self._largest, *largest])
        if largest and np.isfinite(self._largest):
            scale = statistics.recommended_loss_scale(self._largest)
            self.recommended_loss_scale = scale
            self.fits = scale is None or float(self._scale.numpy()) <= scale

    def _write(self):
        if self._folder is None:
            return
        step = self._last
        line = {
            "step": step,
            "loss_scale": float(self._scale.numpy()),
            "recommended_loss_scale": self.recommended_loss_scale,
            "layers": tables.plain(self.rows),
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "numerics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        writer = tf.summary.create_file_writer(str(self._folder / "numerics"))
        with writer.as_default(step):
            for row in self.rows:
                for name in _KINDS:
                    counts = getattr(row, name)
                    for lost in ("underflow", "overflow"):
                        share = counts.share(getattr(counts, lost))
                        tf.summary.scalar(f"numerics/{row.path}/{name}_{lost}", share)
        writer.close()

    def _adapts(self):
        config = getattr(self.model.optimizer, "config", None)
        has_scale = hasattr(self.model.optimizer, "dynamic_scale")
        return has_scale and getattr(config, "dynamic", True)

    def _lost(self):
        """Returns the share of its gradients that each row loses."""
        # A scale that adapts is found by overflows, whose steps are skipped.
        kind = "gradients_underflowed" if self._adapts() else "gradients_lost"
        return {row: float(np.nan_to_num(getattr(row, kind))) for row in self.rows}

    def _warn(self):
        shares, adapts = self._lost(), self._adapts()
        worst = max(shares, key=shares.__getitem__, default=None)
        if self._warned or worst is None or shares[worst] <= self.max_lost:
            return
        lost, self._warned = shares[worst], True
        scaling = (
            ", and adapts"
            if adapts
            else ": tfamp.enable('mixed_float16') before `compile` scales the loss, "
            "and adapts it"
        )
        advice = (
            f"A loss scale of {self.recommended_loss_scale:g} would keep the largest "
            f"finite; it is {float(self._scale.numpy()):g}{scaling}."
            if worst.format == "float16" and self.recommended_loss_scale
            else "Name the layer in overrides={...: 'float32'}."
        )
        user_code.warn(
            f"Step {self._last}: {lost:.1%} of the gradients of "
            f"layer {worst.path!r} are lost in {worst.format}: they become 0, infinite "
            f"or NaN. {advice}"
        )


def _unsynchronized(model):
    """Has normalizations look at one replica: replicas cannot meet in a second pass."""
    layers = structure.layers(model)
    normalizations = [x for x in layers if getattr(x, "synchronized", False)]
    return hooks.replaced([(x, "synchronized", False) for x in normalizations])
