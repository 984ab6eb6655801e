"""What tfamp does when Keras compiles a model and runs its first training step.

| when | what |
|---|---|
| `compile`, once the model is built | its layers get the overrides asked for |
| `compile` | the optimizer scales the loss where a float16 layer trains |
| the first step of a model built by it | the same, once a trace has built it |
| the first step under a graph rewrite | what was rewritten is looked at and said |
"""

import contextlib
import traceback
import warnings
import weakref
from collections.abc import Iterator
from typing import Literal

import keras
import tensorflow as tf
from absl import logging

from tfamp import errors
from tfamp.facts import formats, names
from tfamp.graph_rewrite import observe
from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.inspect import structure
from tfamp.keras_patches import compiling, hooks, places
from tfamp.loss_scaling import optimizer, rule
from tfamp.precision import borders, float32_layers, overrides, plan

_rules: "_Rules | None" = None
_seen: observe.GraphRewriteReport | None = None
# Model -> request -> what its training function showed: TensorFlow keeps what it has
# optimized, and shows it no second time.
_reports: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def install(
    policy: str | None,
    scaling: rule.LossScaleConfig | Literal[False],
    asked: overrides.Overrides,
) -> None:
    """Installs the rules from now on; installing again replaces them.

    Args:
      policy: Name of the dtype policy of layers that are built now; None if it is not
        tfamp's.
      scaling: Settings of the loss scale, or False for no loss scaling.
      asked: The modes of single layers.
    """
    global _rules, _seen
    remove()
    _rules, _seen = _Rules(policy, scaling, asked), None
    _rules.hooks = [compiling.hook_compile(_rules.scale, _rules.before_compile)]
    if owner := places.trainer_class(name := "make_train_function"):
        _rules.hooks.append(hooks.Hook(owner, name, _rules.make_train_function))


def remove() -> None:
    """Puts Keras' own methods back; idempotent."""
    global _rules
    while _rules and _rules.hooks:
        _rules.hooks.pop().remove()
    _rules = None


def has_overridden() -> bool:
    """Whether a model's layers got modes of their own since `install`."""
    return _rules is not None and bool(_rules.matched)


def last_report() -> observe.GraphRewriteReport | None:
    """Returns what a model's first training step last showed of the rewrite."""
    return _seen


def scaled(model: keras.Model) -> keras.optimizers.Optimizer:
    """Returns a compiled model's optimizer as `compile` would have it now."""
    rules = _rules or _Rules(None, rule.LossScaleConfig(), ())
    return rules.scale(model, model.optimizer)


class _Rules:
    """The rules of one `enable`; see `install`."""

    def __init__(self, policy, scaling, asked):
        self._policy, self._scaling, self._asked = policy, scaling, asked
        self.hooks: list[hooks.Hook] = []
        self.matched: set[str] = set()
        self._said: set[str] = set()

    def scale(self, model, given):
        """Returns the optimizer to compile with."""
        # What the patterns match in a model that is not built is not known yet.
        low = any(each.mode.policy == "mixed_float16" for each in self._asked)
        late = low and not _is_built(model)
        if self._scaling is False or not (late or optimizer.needs_loss_scale(model)):
            return given
        return optimizer.wrap_optimizer(given, config=self._scaling)

    def before_compile(self, model, arguments):
        if (floatx := keras.config.floatx()) in formats.LOW:
            self._say(
                f"Losses and metrics are computed in {floatx}, which loses counts and "
                f"overflows: keras.config.floatx() is {floatx!r}. Call keras.config."
                "set_floatx('float32') before this; layers have the mode without it."
            )
        if graph_rewrite.active() is not None:
            _check_policies(model)
            _keep_from_xla(model, arguments)
        if _is_built(model):
            self._override(model)

    def make_train_function(self, original):
        def make_train_function(model, *args, **kwargs):
            is_new = model.train_function is None
            builds = is_new and not _is_built(model)
            if is_new and not builds:
                self._before_training(model)
            original(model, *args, **kwargs)
            if not hasattr(model.train_function, "is_first_step"):
                look = _look_at_first_step(model, is_new)
                if builds or look is not None:
                    step = self._first_step(model, original, look, builds)
                    model.train_function = step
            return model.train_function

        return make_train_function

    def _assigns(self, model):
        """Whether layers of a model that is not built will be assigned a precision."""
        places = structure.walk(model) if self._policy else ()
        return bool(self._asked) or any(
            plan.stays_in_float32(each, self._policy) for each in places
        )

    def _first_step(self, model, original, look, builds):
        """Returns a training function that puts Keras' own back after one call."""
        function = model.train_function

        def first_step(iterator):
            model.train_function = function
            # Without a strategy, Keras 3.15 builds a model while it traces the step.
            early = builds and not model.run_eagerly and self._assigns(model)
            try:
                if early:
                    iterator = _build_by_tracing(model, iterator)
                    self._before_training(model)
                    original(model)  # Overrides make the model forget what it has.
                with look or contextlib.nullcontext():
                    logs = model.train_function(iterator)
                if builds and not early:
                    self._before_training(model)
                    original(model)
            except BaseException as error:
                if not isinstance(error, StopIteration | tf.errors.OutOfRangeError):
                    model.train_function = None  # The next `fit` is a first one again.
                raise
            return logs

        first_step.is_first_step = True  # pyright: ignore[reportFunctionMemberAccess]
        return first_step

    def _before_training(self, model):
        if graph_rewrite.active() is not None:
            _check_policies(model)
        self._override(model)
        if self._scaling is not False:
            optimizer.warn_about_unscaled_optimizers(model)

    def _override(self, model):
        """Gives the layers of a built model their own modes; says if it is older."""
        if self._policy is None or model in plan.SET:
            return
        is_being_made = _is_being_made(model)
        others = [model] if plan.is_of_another(model, self._policy) else []
        if not others:
            self._assign(model, is_being_made)
            others = plan.others(model, self._policy)
        changed = keras.config.dtype_policy().name != self._policy  # By the user.
        if others and not (is_being_made or changed):
            self._say(plan.describe_others(others, self._policy))

    def _assign(self, model, is_being_made):
        planned = plan.Plan(model, self._asked)
        self.matched |= planned.matched
        if not is_being_made:
            planned.check(self.matched)
        if rows := planned.under_enable(self._policy):
            unsaved = plan.apply(model, rows)
            if unsaved and "unsaved" not in self._said:
                self._said.add("unsaved")
                logging.warning("%s", unsaved)
            low = keras.dtype_policies.get(self._policy).compute_dtype
            if slow := float32_layers.mostly_slow(model, low):
                self._say(
                    f"float32 is faster for this model here: most of '{model.name}' "
                    f"({', '.join(slow)}) stays in float32. Use "
                    "tfamp.enable('float32')."
                )

    def _say(self, text):
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, stacklevel=6)


def _is_built(model):
    """Whether a model and its layers are built; Keras says so too soon.

    `build` of a model that defines none marks the model alone as built.
    """
    called, flat = getattr(model, "_called", False), names.flatten_layers(model)
    return model.built and (called or all(x.built for x in flat))


def _is_being_made(model):
    """Whether the model's constructor, or Keras that loads it, compiles it.

    What it will be a part of may not be there yet: it is checked when it trains.
    """
    for frame, _ in traceback.walk_stack(None):
        names = frame.f_code.co_varnames
        if frame.f_code.co_name in ("__init__", "compile_from_config") and names:
            if frame.f_locals.get(names[0]) is model:
                return True
    return False


def _build_by_tracing(model, iterator):
    """Traces a training step, which builds the model; returns the data, not drawn."""
    if isinstance(iterator, tf.data.Iterator):
        data = iterator.element_spec
    else:  # `train_on_batch` gives a generator of one batch.
        batches = list(iterator)
        data, iterator = batches[0], iter(batches)
    # An absent input is `None` in a step, and an empty Optional in a graph.
    convert = getattr(model, "_autoconvert_optionals", lambda step: step)
    step = convert(model.train_step)
    with borders.widening(model):
        tf.function(step, autograph=False).get_concrete_function(data)
    return iterator


# ---- Under a graph rewrite ----


def _check_policies(model):
    places = structure.walk(model)
    low = [x.path for x in places if x.layer.compute_dtype in formats.LOW]
    if low:
        raise ValueError(
            f"Model '{model.name}' has layers that compute in 16 bits by their dtype "
            f"policy ({errors.examples(low)}), while graphs are rewritten, too: "
            "TensorFlow accepts both and undoes float32 layers. Build the model under "
            "the float32 policy, or call tfamp.disable_graph_rewrite() first."
        )


def _keep_from_xla(model, arguments):
    if arguments["jit_compile"] == "auto":
        arguments["jit_compile"] = False  # On a GPU Keras 3.15 makes this True.
    asked = {name: arguments[name] for name in ("run_eagerly", "jit_compile")}
    if any(asked.values()):
        warnings.warn(
            f"Model '{model.name}' is not rewritten to 16 bits and trains in float32: "
            "only graphs are, and not those that XLA compiles. Received: "
            f"{', '.join(f'{name}={value}' for name, value in asked.items())}. Leave "
            "both out, or use the dtype policy instead of the rewrite.",
            stacklevel=4,
        )


def _look_at_first_step(model, is_new):
    """Returns a context for a model's first step under a rewrite, else None."""
    global _seen
    rewrite = graph_rewrite.active()
    if rewrite is None:
        return None
    graph_rewrite.sync_thread()  # Another thread may have enabled the rewrite.
    _check_policies(model)
    reports = _reports.setdefault(model, {})
    if is_new:
        reports.clear()
    _seen = reports.get(rewrite.config)
    return None if _seen else _looked_at(model, rewrite, not is_new)


@contextlib.contextmanager
def _looked_at(model, rewrite, fresh) -> Iterator[None]:
    """Notes, and says, what the rewrite made of a model's first training step."""
    global _seen
    with observe.observe(fresh) as graphs:
        yield
    if graph_rewrite.active() is not rewrite:  # It ended before the step.
        return
    report = observe.make_report(graphs)
    if report.effective is None:
        warnings.warn(f"Model '{model.name}': {report}", stacklevel=4)
    else:
        logging.info("Model '%s': %s", model.name, report)
    _seen = _reports[model][rewrite.config] = report
