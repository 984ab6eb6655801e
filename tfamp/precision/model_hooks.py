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
import functools
import itertools
from typing import Any

import keras
import tensorflow as tf

from tfamp import errors, records
from tfamp.facts import names, user_code
from tfamp.graph_rewrite import first_step
from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.inspect import model_inputs, quantized, structure, traces
from tfamp.keras_patches import compiling, hooks, places, xla_steps
from tfamp.kernels import clusters
from tfamp.loss_scaling import optimizer, train_steps
from tfamp.operators import promotion, reductions
from tfamp.precision import assigned, described, healed, plan, policy, rules
from tfamp.precision import overrides as overriding
from tfamp.precision.settings import OFF, Settings
from tfamp.storage import low_bit

# In a `tf.function`, AutoGraph would rewrite what it calls, from the source on disk.
_NOT_CONVERTED = tf.autograph.experimental.do_not_convert
_PATH = "keras.src.backend.common.name_scope:current_path"
_rules: "_Rules | None" = None
_compiled = itertools.count(1)


def install(settings: Settings) -> None:
    """Installs rules, unless they are in force; `OFF`: for the rewrite alone."""
    global _rules
    if _rules is not None and _rules.settings == settings:
        return
    remove()
    _rules = _Rules(settings)
    makes = xla_steps.hooked(_rules.make_train_function, clusters.HOOKS.gather)
    if settings.is_mixed or settings.remat:
        makes |= {"__call__": _rules.call, "data_layer": _rules.call}
    group = hooks.HookGroup(**makes)
    hooked = compiling.hook_compile(_rules.scale, _rules.before_compile)
    _rules.hooks = [hooked, group]
    group.install()


def remove() -> None:
    """Puts Keras' own methods back; idempotent."""
    global _rules
    while _rules and _rules.hooks:
        _rules.hooks.pop().remove()
    _rules = None
    records.forget_enable()
    first_step.forget()


def has_its_plan(model: keras.Model) -> bool:
    """Whether nothing that `enable` asks of a model is still to come."""
    record = records.of(model)
    return (
        _rules is None or record.precision_is_set or record.enabled.planned is not None
    )


def as_enabled(model: keras.Model, inputs: Any) -> contextlib.AbstractContextManager:
    """Scopes what `enable` gives a built model when it is called on such inputs."""
    if _rules is None or has_its_plan(model) or not _rules.plans(model):
        return contextlib.nullcontext()
    planned = _rules.planned(model, rules.traced_by(model, inputs))
    return assigned.assigned(model, planned)


def scaled(model: keras.Model, unscaled: Any = None) -> keras.optimizers.Optimizer:
    """Returns an optimizer, the model's own, as `compile` would have it now."""
    return (_rules or _Rules(OFF)).scale(model, unscaled or model.optimizer)


def is_unscaled() -> bool:
    """Whether `enable` was called with `loss_scale=False`."""
    return _rules is not None and _rules.scaling is False


class _Rules:
    """The rules of one `enable`; see `install`."""

    def __init__(self, settings):
        self.settings, self.hooks = settings, []
        self.is_mixed, self.overrides = settings.is_mixed, settings.overrides
        self.scaling = settings.scaling
        self._policy = None if settings is OFF else settings.mode.policy
        self._state = settings.options.optimizer_state
        self._matched: set[str] = set()
        # The last one returns None where no file is being loaded.
        self._attribute, self._is_stateless, self._loading = map(
            names.resolve, places.CALLS
        )

    # ---- compile and fit ----

    def scale(self, model, unscaled):
        """Returns the optimizer to compile with."""
        low = any(x.mode.policy == "mixed_float16" for x in self.overrides)
        # What patterns match is not known before it is built.
        late = low and not structure.is_built(model)
        now = records.of(model).enabled
        now.scales_loss = now.compiled > 0
        if self.scaling is False or not (late or optimizer.needs_loss_scale(model)):
            return unscaled
        return optimizer.wrap_optimizer(unscaled, config=self.scaling)

    def before_compile(self, model, arguments):
        low_bit.store_slots(model, arguments["optimizer"], self._state)
        policy.warn_of_floatx()
        if graph_rewrite.active() is not None:
            first_step.check_policies(model)
            first_step.keep_from_xla(model, arguments)
        now = records.of(model).enabled
        now.compiled, now.scales_loss = now.compiled or next(_compiled), False
        self._plan(model)

    def make_train_function(self, original):
        def make_train_function(model, *args, **kwargs):
            is_new = model.train_function is None
            builds = is_new and not structure.is_built(model)
            for each in (train_steps.HOOKS, clusters.HOOKS):
                each.add(type(model))
            if is_new:
                scales = records.of(model).enabled.scales_loss
                if scales and model.optimizer is not None:
                    with model.distribute_strategy.scope():  # Set after `compile`.
                        model.optimizer = self.scale(model, model.optimizer)
                low_bit.store_slots(model, model.optimizer, self._state)
                if not builds:
                    self._before_training(model)
            original(model, *args, **kwargs)
            if self.scaling is not False:
                assigns = self.settings.options.heal
                optimizer.watch_steps(
                    model, functools.partial(healed.heal, model, assigns=assigns)
                )
            if not hasattr(model.train_function, "then_function"):
                look = first_step.look(model, is_new)
                if builds or look is not None:
                    then = functools.partial(self._built, model, original)
                    compiling.run_once(model, look, then if builds else None)
            return model.train_function

        return make_train_function

    def _built(self, model, original):
        self._before_training(model)
        original(model)  # Layers that it built late may have been assigned.

    def _before_training(self, model):
        if graph_rewrite.active() is not None:
            first_step.check_policies(model)
        self._plan(model)
        modes = {quantized.mode_of(layer) for layer in names.flatten_layers(model)}
        quantized.check_graph(model, quantized.FLOAT8 in modes)
        if self.settings.options.weights != "float32" and model.optimizer:
            low_bit.store_weights(model)
        if self.scaling is not False:
            optimizer.warn_about_unscaled_optimizers(model)

    # ---- The plan of a model ----

    def plans(self, model):
        """Whether layers of a model may get another format than the mode's."""
        return self.is_mixed and not described.is_of_another(model, self._policy)

    def planned(self, root, traced=None):
        """Returns the plan of a model, or of one around it."""
        traced, keeps = traced or rules.latest(root), plan.keeps_unlike(self._policy)
        settings = self.settings
        return plan.Plan(
            root, settings.mode, self.overrides, traced, keeps, settings.remat
        )

    def _plan(self, model):
        """Gives a compiled model's layers their plan; says if it is older."""
        if self._policy is None or records.of(model).precision_is_set:
            return
        is_built = structure.is_built(model)
        is_being_made = compiling.is_being_made(model)
        others = [model] if described.is_of_another(model, self._policy) else []
        if not others:
            check, layers = is_built and not is_being_made, structure.layer_ids(model)
            if records.of(model).enabled.planned == layers:
                self._check(self.planned(model), check)
            else:
                self._plan_anew(model, layers, is_built, check)
            if is_built:
                others = described.others(model, self._policy)
        if others and not is_being_made:
            user_code.warn(described.describe_others(others, self._policy))

    def _plan_anew(self, model, layers, is_built, check):
        now, traced = records.of(model).enabled, None
        now.planned = None
        if is_built and self.is_mixed:
            with contextlib.suppress(errors.ExportError):  # Its first call will.
                traced = rules.traced_by(model)
        self._assign(model, model, traced, check, takes_over=True)
        if traced or not self.is_mixed:
            now.planned = layers

    def _check(self, planned, check):
        """Raises OverrideError for patterns that have matched no model so far."""
        self._matched |= planned.matched
        if check:
            planned.check(self._matched)

    def _assign(self, root, model, traced, check, takes_over=False):
        """Gives a model's layers what a plan says; `takes_over`: it is compiled."""
        planned = self.planned(root, traced)
        self._check(planned, check)
        assigned.keep(model, planned, takes_over)
        if lost := described.unsaved(planned) if self.overrides else "":
            user_code.log(lost)
        described.tell_of_trace(model, traced)
        if check:
            described.tell_of_slow(model, self.settings.mode.compute_format)

    # ---- Calls ----

    def call(self, original):
        def __call__(layer, *args, **kwargs):
            if traces.is_tracing():
                return original(layer, *args, **kwargs)
            if not records.of(layer).enabled.was_called:
                with self._meet(layer):
                    return __call__(layer, *args, **kwargs)
            if isinstance(layer, keras.layers.Embedding) and not self._is_stateless():
                rules.check_ids(layer, *args)
            if not isinstance(layer, keras.Model) or self._is_inside(args, kwargs):
                try:
                    return original(layer, *args, **kwargs)
                except Exception as error:
                    described.add_override(error, layer)
                    raise
            settles = self._settle(layer, args, kwargs)
            try:
                outputs = original(layer, *args, **kwargs)
            except BaseException:
                if settles:
                    records.of(layer).enabled.planned = None
                raise
            widens = self.settings.options.float32_outputs
            return promotion.widened(outputs) if widens else outputs

        return __call__

    def _is_inside(self, args, kwargs):
        """Whether a layer or model makes this call, or it makes a graph of layers."""
        inside = self._attribute("current_call_ctx") is not None
        flat = [] if inside else keras.tree.flatten((args, kwargs))
        return inside or any(isinstance(x, keras.KerasTensor) for x in flat)

    @_NOT_CONVERTED
    def _meet(self, layer):
        """Gives a layer what its first call needs; scopes what is for that call alone.

        It may be in no model yet.
        """
        now, held = records.of(layer).enabled, structure.policy(layer)
        now.was_called = True
        if held.name != self._policy and not layer.built and self._loading() is None:
            now.is_explicit = not policy.was_global(held)
        reductions.HOOKS.add(layer.activity_regularizer)
        around = names.resolve(_PATH, str)()
        path = f"{around}/{layer.name}" if around else layer.name
        override = overriding.find((path,), self.overrides)
        if override and not isinstance(layer, keras.Model):
            row = override.mode.policy, override.reason
            return assigned.assign(layer, {id(layer): row}, forget=False)
        if row := plan.at_first_call(layer, self.settings.mode):
            assigned.assign(layer, {id(layer): row}, forget=False)
        return contextlib.nullcontext()

    @_NOT_CONVERTED
    def _settle(self, model, args, kwargs):
        """Gives a model that is called first its plan; returns whether it did."""
        if self._policy is None or has_its_plan(model) or self._is_stateless():
            return False
        # A replica does not wait: its strategy may hold the lock meanwhile.
        waits = tf.distribute.in_cross_replica_context()
        if not assigned.EXCLUSIVE.acquire(blocking=waits):
            return False
        try:
            if has_its_plan(model) or assigned.in_force():
                return False
            self._settle_now(model, args, kwargs)
            records.of(model).enabled.planned = structure.layer_ids(model)
            return True
        finally:
            assigned.EXCLUSIVE.release()

    def _settle_now(self, model, args, kwargs):
        if described.is_of_another(model, self._policy):
            return
        numbers = {x: each.enabled.compiled for x, each in records.every()}
        around = [
            x for x, n in numbers.items() if n and id(model) in structure.layer_ids(x)
        ]
        root = max(around, key=numbers.get, default=model)
        traced = None
        self._assign(root, model, traced, check=False)  # The formats that are traced.
        if structure.is_functional(model):  # By its own specs: Keras warns of others.
            with contextlib.suppress(errors.ExportError):
                traced = rules.traced_by(model)
        else:
            model_inputs.remember(model, args[0] if len(args) == 1 else None)
        try:
            traced = traced or rules.traced(model, *args, **kwargs)
        except Exception as error:  # Code of the user's layers may raise anything.
            described.tell_of_untraced(model, error)
        self._assign(root, model, traced, check=model in around)
