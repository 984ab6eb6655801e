"""What tfamp does when Keras compiles a model, first calls it, and first trains it.

| when | what |
|---|---|
| `compile` | layers get their plan, as far as the model is built |
| `compile` | the optimizer scales the loss where a float16 layer trains |
| a layer's first call | what takes raw values is float32 from then on |
| a model's first call | its layers get their plan, with what a trace of it tells |
| any call by the user's code | a model returns float32 |
| the first training step | patterns that matched nothing are an error |
| that under a rewrite | what was rewritten is looked at, and said |
"""

import contextlib
import warnings
import weakref
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf
from absl import logging

from tfamp import errors
from tfamp.facts import formats, modes, names
from tfamp.graph_rewrite import first_step
from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.inspect import structure, traces
from tfamp.keras_patches import compiling, hooks, places
from tfamp.loss_scaling import optimizer, rule, skipped_steps
from tfamp.precision import assigned, described, plan, promotion, rules
from tfamp.precision import overrides as overriding

_rules: "_Rules | None" = None
# Models that have their plan: from `enable` or `set_precision`.
SETTLED: weakref.WeakSet = weakref.WeakSet()
# Of those, the models that `set_precision` was called on.
SET: weakref.WeakSet = weakref.WeakSet()


class Asked(NamedTuple):
    """What the hooks need to know of `enable`.

    Attributes:
      mode: The mode of layers that are built now; None if it is not tfamp's.
      scaling, overrides, float32_outputs: As of `settings.Settings`.
      is_mixed: Whether any layer computes in 16 bits.
    """

    mode: modes.Mode | None = None
    scaling: rule.LossScaleConfig | Literal[False] = rule.LossScaleConfig()
    overrides: overriding.Overrides = ()
    is_mixed: bool = False
    float32_outputs: bool = True


def install(asked: Asked) -> None:
    """Installs the rules from now on; what is asked already stays as it is."""
    global _rules
    if _rules is not None and _rules.asked == asked:
        return
    remove()
    _rules = _Rules(asked)
    made = [compiling.hook_compile(_rules.scale, _rules.before_compile)]
    wanted = {"make_train_function": _rules.make_train_function}
    if asked.is_mixed:
        wanted |= {"__call__": _rules.call, "data_layer": _rules.call}
    for key, make in wanted.items():
        place = places.PLACES[key]
        if owner := place.find():
            made.append(hooks.Hook(owner, place.name, make))
    _rules.hooks = made


def remove() -> None:
    """Puts Keras' own methods back; idempotent."""
    global _rules
    while _rules and _rules.hooks:
        _rules.hooks.pop().remove()
    _rules = None
    first_step.forget()


def has_its_plan(model: keras.Model) -> bool:
    """Whether nothing that `enable` asks of a model is still to come."""
    return _rules is None or model in SETTLED


def as_enabled(model: keras.Model, inputs: Any) -> contextlib.AbstractContextManager:
    """Scopes what `enable` gives a model when it is called, if it was not yet.

    Args:
      model: A built model.
      inputs: Tensors or `tf.TensorSpec`s, structured as the model takes them.
    """
    if _rules is None or has_its_plan(model) or not _rules.plans(model):
        return contextlib.nullcontext()
    planned = _rules.planned(model, rules.traced_by(model, inputs))
    return assigned.assigned(model, planned)


def scaled(model: keras.Model) -> keras.optimizers.Optimizer:
    """Returns a compiled model's optimizer as `compile` would have it now."""
    return (_rules or _Rules(Asked())).scale(model, model.optimizer)


class _Rules:
    """The rules of one `enable`; see `install`."""

    def __init__(self, asked):
        self.asked, self.hooks = asked, []
        self.matched: set[str] = set()
        self._policy = asked.mode and asked.mode.policy
        self._said: set[str] = set()
        self._met: weakref.WeakSet = weakref.WeakSet()
        self._compiled: weakref.WeakSet = weakref.WeakSet()
        attribute, stateless, loading = places.CALLS
        self._attribute = names.resolve(attribute)
        self._is_stateless = names.resolve(stateless)
        self._loading = names.resolve(loading)  # None: no file is being loaded.

    # ---- compile and fit ----

    def scale(self, model, given):
        """Returns the optimizer to compile with."""
        # What the patterns match in a model that is not built is not known yet.
        scaling, asked = self.asked.scaling, self.asked.overrides
        low = any(each.mode.policy == "mixed_float16" for each in asked)
        late = low and not structure.is_built(model)
        if scaling is False or not (late or optimizer.needs_loss_scale(model)):
            return given
        return optimizer.wrap_optimizer(given, config=scaling)

    def before_compile(self, model, arguments):
        if (floatx := keras.config.floatx()) in formats.LOW:
            self._say(
                f"Losses and metrics are computed in {floatx}, which loses counts and "
                f"overflows: keras.config.floatx() is {floatx!r}. Call keras.config."
                "set_floatx('float32') before this; layers have the mode without it."
            )
        if graph_rewrite.active() is not None:
            first_step.check_policies(model)
            first_step.keep_from_xla(model, arguments)
        self._compiled.add(model)
        self._plan(model)

    def make_train_function(self, original):
        def make_train_function(model, *args, **kwargs):
            is_new = model.train_function is None
            builds = is_new and not structure.is_built(model)
            if is_new and not builds:
                self._before_training(model)
            original(model, *args, **kwargs)
            if self.asked.scaling is not False:
                skipped_steps.watch(model)
            if not hasattr(model.train_function, "is_first_step"):
                look = first_step.look(model, is_new)
                if builds or look is not None:
                    first = self._first_step(model, original, look, builds)
                    model.train_function = first
            return model.train_function

        return make_train_function

    def _first_step(self, model, original, look, builds):
        """Returns a training function that puts Keras' own back after one call."""
        function = model.train_function

        def step(iterator):
            model.train_function = function
            try:
                with look or contextlib.nullcontext():
                    logs = function(iterator)
                if builds:
                    self._before_training(model)
                    original(model)  # Layers that it built late may have been assigned.
            except BaseException as error:
                if not isinstance(error, StopIteration | tf.errors.OutOfRangeError):
                    model.train_function = None  # The next `fit` is a first one again.
                raise
            return logs

        step.is_first_step = True  # pyright: ignore[reportFunctionMemberAccess]
        return step

    def _before_training(self, model):
        if graph_rewrite.active() is not None:
            first_step.check_policies(model)
        self._plan(model)
        if self.asked.scaling is not False:
            optimizer.warn_about_unscaled_optimizers(model)

    # ---- The plan of a model ----

    def plans(self, model):
        """Whether layers of a model may get another format than the mode's."""
        return self.asked.is_mixed and not described.is_of_another(model, self._policy)

    def planned(self, root, traced=None):
        """Returns the plan of a model, or of one around it."""
        given = self.asked.mode, self.asked.overrides, traced or rules.UNTRACED
        stays = lambda layer: layer.dtype_policy.name != self._policy  # noqa: E731
        return plan.Plan(root, *given, stays=stays)

    def _plan(self, model):
        """Gives a compiled model's layers their plan; says if it is older."""
        if self._policy is None or model in SET:
            return
        is_built = structure.is_built(model)
        is_being_made = compiling.is_being_made(model)
        others = [model] if described.is_of_another(model, self._policy) else []
        if not others:
            traced = None
            if is_built and self.asked.is_mixed and model not in SETTLED:
                with contextlib.suppress(errors.ExportError):  # Its first call will.
                    traced = rules.traced_by(model)
            self._assign(model, model, traced, check=is_built and not is_being_made)
            if traced or not self.asked.is_mixed:
                SETTLED.add(model)
            others = described.others(model, self._policy) if is_built else []
        changed = keras.config.dtype_policy().name != self._policy  # By the user.
        if others and not (is_being_made or changed):
            self._say(described.describe_others(others, self._policy))

    def _assign(self, root, model, traced, check, forget=True):
        """Gives the layers of a model what the plan of one around it says."""
        planned = self.planned(root, traced)
        self.matched |= planned.matched
        if check:
            planned.check(self.matched)
        assigned.keep(model, planned, forget)
        asks = any("asked for" in reason for _, reason in planned.rows.values())
        lost = described.unsaved(planned) if asks else ""
        if lost and "unsaved" not in self._said:
            self._said.add("unsaved")
            logging.warning("%s", lost)
        for name in traced.rounded if traced else ():
            self._say(
                f"Layer {name!r} gets values that were rounded to 16 bits before it, "
                "as years and prices must not be. Put it before other layers, or name "
                "those in overrides={...: 'float32'}."
            )
        low = self.asked.mode.compute_format
        if check and (slow := rules.mostly_slow(model, low)):
            self._say(
                f"float32 is faster for this model here: most of '{model.name}' "
                f"({', '.join(slow)}) stays in float32. Use tfamp.enable('float32')."
            )

    # ---- Calls ----

    def call(self, original):
        def __call__(layer, *args, **kwargs):
            if traces.is_tracing():
                return original(layer, *args, **kwargs)
            if layer not in self._met:
                self._meet(layer)
            if isinstance(layer, keras.layers.Embedding):
                rules.check_ids(layer, *args)
            if not isinstance(layer, keras.Model) or self._is_inside(args, kwargs):
                return original(layer, *args, **kwargs)
            settles = self._settle(layer, args, kwargs)
            try:
                outputs = original(layer, *args, **kwargs)
            except BaseException:
                if settles:
                    SETTLED.discard(layer)
                raise
            return promotion.widened(outputs) if self.asked.float32_outputs else outputs

        return __call__

    def _is_inside(self, args, kwargs):
        """Whether a layer or model makes this call, or it makes a graph of layers."""
        if self._attribute("current_call_ctx") is not None:
            return True
        flat = keras.tree.flatten((args, kwargs))
        return any(isinstance(x, keras.KerasTensor) for x in flat)

    def _meet(self, layer):
        self._met.add(layer)
        held = layer.dtype_policy.name
        if layer in assigned.REASONS:
            return
        if held != self._policy:
            here = keras.config.dtype_policy().name == self._policy
            if here and not layer.built and self._loading() is None:
                assigned.REASONS[layer] = plan.MADE_SO
            return
        low = keras.dtype_policies.get(held).compute_dtype
        if low in formats.LOW and (why := rules.by_kind(layer, low, first_call=True)):
            assigned.assign(layer, {id(layer): ("float32", why)}, forget=False)

    def _settle(self, model, args, kwargs):
        """Gives a model that is called first its plan; returns whether it did."""
        if self._policy is None or model in SETTLED or self._is_stateless():
            return False
        # A replica does not wait: its strategy may hold the lock meanwhile.
        waits = tf.distribute.in_cross_replica_context()
        if not assigned.EXCLUSIVE.acquire(blocking=waits):
            return False
        try:
            if model in SETTLED or assigned.in_force():
                return False
            self._settle_now(model, args, kwargs)
            SETTLED.add(model)
            return True
        finally:
            assigned.EXCLUSIVE.release()

    def _settle_now(self, model, args, kwargs):
        if described.is_of_another(model, self._policy):
            return
        around = (x for x in self._compiled if structure.holds(x, model))
        root = next(around, model)
        self._assign(root, model, None, check=False, forget=False)
        try:
            traced = rules.traced(model, *args, **kwargs)
        except Exception as error:  # Code of the user's layers may raise anything.
            logging.info(
                "Model %r cannot be traced, so that its output layers are not known: "
                "%s. They stay in float32 if overrides name them.",
                *(model.name, error),
            )
            traced = None
        self._assign(root, model, traced, model in self._compiled, forget=False)

    def _say(self, text):
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, stacklevel=6)
