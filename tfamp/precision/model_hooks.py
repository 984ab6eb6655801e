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
from tfamp.graph_rewrite import first_step, switch
from tfamp.inspect import model_inputs, quantized, structure, traces
from tfamp.keras_patches import compiling, hooks, patches, xla_steps
from tfamp.kernels import clusters
from tfamp.loss_scaling import train_steps, wrapping
from tfamp.operators import promotion, reductions
from tfamp.precision import (
    assigned,
    described,
    healed,
    overrides,
    plan,
    policy,
    rules,
)
from tfamp.precision.settings import OFF, Settings
from tfamp.storage import low_bit

# In a `tf.function`, AutoGraph would rewrite what it calls, from the source on disk.
_NOT_CONVERTED = tf.autograph.experimental.do_not_convert
_PATH = "keras.src.backend.common.name_scope:current_path"
_enabled: "_Enabled | None" = None
_compiled = itertools.count(1)


def install(settings: Settings) -> None:
    """Installs the hooks, unless they are in force; `OFF`: for the rewrite alone."""
    global _enabled
    if _enabled is not None and _enabled.settings == settings:
        return
    remove()
    _enabled = _Enabled(settings)
    make = hooks.around(_enabled.make_train_function)
    makes = xla_steps.hooked(make, clusters.HOOKS.is_active)
    if settings.is_mixed or settings.remat:
        makes |= dict.fromkeys(("__call__", "data_layer"), hooks.around(_enabled.call))
    group = hooks.HookGroup(**makes)
    hooked = compiling.hook_compile(_enabled.scale, _enabled.before_compile)
    _enabled.hooks = [hooked, group]
    group.install()


def remove() -> None:
    """Puts Keras' own methods back; idempotent."""
    global _enabled
    while _enabled and _enabled.hooks:
        _enabled.hooks.pop().remove()
    _enabled = None
    for _, record in records.every():
        record.enabled = records.Enabled()
    first_step.forget()


def has_its_plan(model: keras.Model) -> bool:
    """Whether a model has its plan, or `enable` is not in force."""
    record = records.of(model)
    is_planned = record.precision_is_set or record.enabled.planned is not None
    return _enabled is None or is_planned


def as_enabled(model: keras.Model, inputs: Any) -> contextlib.AbstractContextManager:
    """Scopes what `enable` gives a built model when it is called on such inputs."""
    if (
        _enabled is None
        or has_its_plan(model)
        or not _enabled.settings.is_mixed
        or described.is_of_another(model, _enabled.settings.mode.policy)
    ):
        return contextlib.nullcontext()
    planned = _enabled.plan_of(model, rules.traced_by(model, inputs))
    return assigned.assigned(model, planned)


def scaled(model: keras.Model, unscaled: Any = None) -> keras.optimizers.Optimizer:
    """Returns an optimizer, the model's own, as `compile` would have it now."""
    return (_enabled or _Enabled(OFF)).scale(model, unscaled or model.optimizer)


def is_unscaled() -> bool:
    """Whether `enable` was called with `loss_scale=False`."""
    return _enabled is not None and _enabled.settings.scaling is False


class _Enabled:
    """The hooks of one `enable`, and the plans that it gives models; see `install`."""

    def __init__(self, settings):
        self.settings, self.hooks, self._policy = settings, [], settings.mode.policy
        self._options, self._state = settings.options, settings.options.optimizer_state
        self._matched: set[str] = set()  # Patterns that have matched in any model.
        # The last one returns None where no file is being loaded.
        self._attribute, self._is_stateless, self._loading = map(
            names.resolve, patches.CALLS
        )

    # ---- compile and fit ----

    def before_compile(self, model, arguments):
        low_bit.store_slots(model, arguments["optimizer"], self._state)
        policy.warn_of_floatx()
        if switch.active() is not None:
            first_step.check_policies(model)
            first_step.keep_from_xla(model, arguments)
        now = records.of(model).enabled
        now.compiled, now.scales_loss = now.compiled or next(_compiled), False
        self.give_compiled(model)

    def scale(self, model, unscaled):
        """Returns the optimizer to compile with."""
        low = any(x.mode.policy == "mixed_float16" for x in self.settings.overrides)
        # What patterns match is not known before it is built.
        late = low and not structure.is_built(model)
        now, config = records.of(model).enabled, self.settings.scaling
        now.scales_loss = now.compiled > 0
        if config is False or not (late or wrapping.needs_loss_scale(model)):
            return unscaled
        return wrapping.wrap_optimizer(unscaled, config=config)

    def make_train_function(self, original, model, *args, **kwargs):
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
        if self.settings.scaling is not False:
            heal = functools.partial(healed.heal, model, assigns=self._options.heal)
            wrapping.watch_steps(model, heal)
        if not hasattr(model.train_function, "then_function"):
            look = first_step.look(model, is_new)
            if builds or look is not None:
                then = functools.partial(self._built, model, original)
                compiling.run_once(model, look, then if builds else None)
        return model.train_function

    def _built(self, model, original):
        self._before_training(model)
        original(model)  # Layers that it built late may have been assigned.

    def _before_training(self, model):
        if switch.active() is not None:
            first_step.check_policies(model)
        self.give_compiled(model)
        kinds = {quantized.quantization_of(x) for x in names.flatten_layers(model)}
        quantized.check_graph(model, quantized.FLOAT8 in kinds)
        if self._options.weights != "float32" and model.optimizer:
            low_bit.store_weights(model)
        if self.settings.scaling is not False:
            wrapping.warn_about_unscaled_optimizers(model)

    # ---- Calls ----

    def call(self, original, layer, /, *args, **kwargs):
        if traces.is_tracing():
            return original(layer, *args, **kwargs)
        if not records.of(layer).enabled.was_called:
            with self._prepare_first_call(layer):
                return self.call(original, layer, *args, **kwargs)
        if isinstance(layer, keras.layers.Embedding) and not self._is_stateless():
            rules.check_ids(layer, *args)
        if not isinstance(layer, keras.Model) or self._is_inside(args, kwargs):
            try:
                return original(layer, *args, **kwargs)
            except Exception as error:
                described.add_override(error, layer)
                raise
        gives = not self._is_stateless()
        is_given = gives and self.give_called(layer, args, kwargs)
        try:
            outputs = original(layer, *args, **kwargs)
        except BaseException:
            if is_given:
                records.of(layer).enabled.planned = None
            raise
        return promotion.widened(outputs) if self._options.float32_outputs else outputs

    def _is_inside(self, args, kwargs):
        """Whether a layer or model makes this call, or it makes a graph of layers."""
        inside = self._attribute("current_call_ctx") is not None
        flat = [] if inside else keras.tree.flatten((args, kwargs))
        return inside or any(isinstance(x, keras.KerasTensor) for x in flat)

    @_NOT_CONVERTED
    def _prepare_first_call(self, layer):
        """Applies first-call rules for good; scopes an override for this call alone."""
        now, held = records.of(layer).enabled, structure.policy(layer)
        now.was_called = True
        is_other = held.name != self._policy
        if is_other and not layer.built and self._loading() is None:
            now.is_explicit = not policy.was_global(held)
        reductions.HOOKS.add(layer.activity_regularizer)
        around = names.resolve(_PATH, str)()
        path = f"{around}/{layer.name}" if around else layer.name
        override = overrides.find((path,), self.settings.overrides)
        if override and not isinstance(layer, keras.Model):
            row = override.mode.policy, override.reason
            return assigned.assign(layer, {id(layer): row}, forget=False)
        if row := plan.at_first_call(layer, self.settings.mode):
            assigned.assign(layer, {id(layer): row}, forget=False)
        return contextlib.nullcontext()

    # ---- Plans ----

    def plan_of(self, root, traced=None):
        """Returns the plan of a model, or of one around it."""
        settings, keeps = self.settings, plan.keeps_unlike(self._policy)
        traced = traced or rules.latest(root)
        return plan.Plan(
            root, settings.mode, settings.overrides, traced, keeps, settings.remat
        )

    def _checked(self, root, traced, check):
        """Returns a plan; `check`: patterns that matched no model yet are an error."""
        planned = self.plan_of(root, traced)
        self._matched |= planned.matched
        if check:
            planned.check(self._matched)
        return planned

    def give_compiled(self, model):
        """Gives a compiled model's layers their plan; says if it is older."""
        record = records.of(model)
        if self.settings is OFF or record.precision_is_set:
            return
        now, layers = record.enabled, structure.layer_ids(model)
        is_being_made = compiling.is_being_made(model)
        is_built = structure.is_built(model)
        check, traced, others = is_built and not is_being_made, None, []
        if described.is_of_another(model, self._policy):
            others = [model]
        elif now.planned == layers:
            self._checked(model, None, check)
        else:
            now.planned = None
            if is_built and self.settings.is_mixed:
                with contextlib.suppress(errors.ExportError):
                    traced = rules.traced_by(model)
            self._give(model, model, traced, check, takes_over=True)
            if traced or not self.settings.is_mixed:  # Else its first call will.
                now.planned = layers
        if is_built and not others:
            others = described.others(model, self._policy)
        if others and not is_being_made:
            user_code.warn(described.describe_others(others, self._policy))

    @_NOT_CONVERTED
    def give_called(self, model, args, kwargs):
        """Gives a model that is called first its plan; returns whether it did."""
        # A replica does not wait: its strategy may hold the lock meanwhile.
        waits = tf.distribute.in_cross_replica_context()
        if has_its_plan(model) or not assigned.EXCLUSIVE.acquire(blocking=waits):
            return False
        try:
            if has_its_plan(model) or assigned.in_force():
                return False
            if not described.is_of_another(model, self._policy):
                self._give_by_call(model, args, kwargs)
            records.of(model).enabled.planned = structure.layer_ids(model)
            return True
        finally:
            assigned.EXCLUSIVE.release()

    def _give_by_call(self, model, args, kwargs):
        around = [
            x
            for x, record in records.every()
            if record.enabled.compiled and id(model) in structure.layer_ids(x)
        ]
        root = max(around, key=lambda x: records.of(x).enabled.compiled, default=model)
        self._give(root, model, None, check=False)  # The formats that are traced.
        traced = None
        if structure.is_functional(model):  # By its own specs: Keras warns of others.
            with contextlib.suppress(errors.ExportError):
                traced = rules.traced_by(model)
        else:
            model_inputs.remember(model, args[0] if len(args) == 1 else None)
        try:
            traced = traced or rules.traced(model, *args, **kwargs)
        except Exception as error:  # Code of the user's layers may raise anything.
            described.tell_of_untraced(model, error)
        self._give(root, model, traced, check=model in around)

    def _give(self, root, model, traced, check, takes_over=False):
        """Gives a model's layers what a plan says; `takes_over`: it is compiled."""
        planned = self._checked(root, traced, check)
        assigned.keep(model, planned, takes_over)
        if lost := described.unsaved(planned) if self.settings.overrides else "":
            user_code.log(lost)
        described.tell_of_trace(model, traced)
        if check:
            described.tell_of_slow(model, self.settings.mode.compute_format)
