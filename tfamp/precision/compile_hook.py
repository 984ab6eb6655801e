"""What tfamp does when Keras compiles a model and runs its first training step.

| when | what |
|---|---|
| `compile`, once the model is built | its layers get the overrides asked for |
| `compile` | the optimizer scales the loss where a float16 layer trains |
| the first step of a model built by it | the same, once a trace has built it |
| the first step under a graph rewrite | what was rewritten is looked at and said |
"""

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Iterator
from typing import Literal

import keras
import tensorflow as tf
from absl import logging

from tfamp import patches
from tfamp.graph_rewrite import observe
from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.loss_scaling import optimizer, rule
from tfamp.precision import assign, float32_layers, overrides, plan

_MOST_SHOWN = 5
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
    _seen = None
    _rules = rules = _Rules(policy, scaling, asked)
    train = "make_train_function"
    owner = patches.trainer_class(train)
    rules.hooks.append(patches.hook_compile(rules.scale, rules.before_compile))
    rules.hooks.append(patches.Hook(owner, train, rules.make_train_function))


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
        self.hooks: list[patches.Hook] = []
        self.matched: set[str] = set()
        self._told = False
        self._warned: weakref.WeakSet = weakref.WeakSet()
        self._slower: weakref.WeakSet = weakref.WeakSet()

    def scale(self, model, given):
        """Returns the optimizer to compile with."""
        # What the patterns match in a model that is not built is not known yet.
        low = any(each.mode.policy == "mixed_float16" for each in self._asked)
        late = low and not _is_built(model)
        if self._scaling is False or not (late or optimizer.needs_loss_scale(model)):
            return given
        return optimizer.wrap_optimizer(given, **vars(self._scaling))

    def before_compile(self, model, arguments):
        if graph_rewrite.active() is not None:
            _check_policies(model)
            _keep_from_xla(model, arguments)
        if _is_built(model):
            self._override(model)

    def make_train_function(self, original):
        def make_train_function(model, *args, **kwargs):
            is_new, built = model.train_function is None, _is_built(model)
            if is_new and built:
                self._before_training(model)
            original(model, *args, **kwargs)
            if not getattr(model.train_function, "is_first_step", False):
                look = _look_at_first_step(model, is_new)
                builds = is_new and not built
                if builds or look is not None:
                    model.train_function = self._first_step(
                        model, original, look, builds
                    )
            return model.train_function

        return make_train_function

    def _assigns(self, model):
        """Whether layers of a model that is not built will be assigned a precision."""
        low = self._policy and keras.dtype_policies.get(self._policy).compute_dtype
        return bool(self._asked) or any(
            float32_layers.reason(layer) or float32_layers.slow_reason(layer, low)
            for layer in (model._flatten_layers() if low in assign.LOW else ())
        )

    def _first_step(self, model, original, look, builds):
        """Returns a training function that puts Keras' own back after one call."""
        function = model.train_function

        def first_step(iterator):
            if model.train_function is first_step:
                model.train_function = function
            # Without a strategy, Keras 3.15 builds a model while it traces the step.
            early = builds and self._assigns(model) and not model.run_eagerly
            step = function
            try:
                if early:
                    iterator = _build_by_tracing(model, iterator)
                    step = self._after_build(model, original)
                with look or contextlib.nullcontext():
                    logs = step(iterator)
                if builds and not early:
                    self._after_build(model, original)
            except (StopIteration, tf.errors.OutOfRangeError):
                raise
            except BaseException:
                model.train_function = None  # The next `fit` is a first one again.
                raise
            return logs

        first_step.is_first_step = True  # pyright: ignore[reportFunctionMemberAccess]
        return first_step

    def _after_build(self, model, original):
        self._before_training(model)
        if model.train_function is None:  # Overrides made the model forget it.
            original(model)
        return model.train_function

    def _before_training(self, model):
        if graph_rewrite.active() is not None:
            _check_policies(model)
        self._override(model)
        if self._scaling is not False:
            optimizer.warn_about_unscaled_optimizers(model)

    def _override(self, model):
        """Gives the layers of a built model their own modes; says if it is older."""
        if self._policy is None or plan.was_set(model):
            return
        is_being_made = _is_being_made(model)
        before = plan.is_of_another(model, self._policy)
        if not before:
            self._assign(model, is_being_made)
        changed = keras.config.dtype_policy().name != self._policy  # By the user.
        if not (is_being_made or changed or model in self._warned):
            others = [model] if before else plan.others(model, self._policy)
            self._warn_of_others(model, others)

    def _assign(self, model, is_being_made):
        planned = plan.Plan(model, self._asked)
        missing = planned.unmatched()
        if not is_being_made:
            planned.check_matched([p for p in missing if p not in self.matched])
        self.matched |= {each.pattern for each in self._asked} - set(missing)
        if rows := planned.under_enable(self._policy):
            unsaved = plan.apply(model, rows)
            if unsaved and not self._told:
                self._told = True
                plan.warn_of_unsaved(unsaved)
            self._warn_of_slower(model)

    def _warn_of_slower(self, model):
        low = keras.dtype_policies.get(self._policy).compute_dtype
        slow = float32_layers.mostly_slow(model, low)
        if slow and model not in self._slower:
            self._slower.add(model)
            warnings.warn(
                f"float32 is faster for this model here: most of '{model.name}' "
                f"({', '.join(slow)}) stays in float32. Use tfamp.enable('float32').",
                stacklevel=6,
            )

    def _warn_of_others(self, model, models):
        if not models:
            return
        self._warned.add(model)
        names = ", ".join(repr(each.name) for each in models)
        layers = [x for each in models for x in plan.weighted(each)]
        kept = sorted({each.dtype_policy.name for each in layers})
        paths = ", ".join(each.path for each in layers[:_MOST_SHOWN])
        warnings.warn(
            f"Model {names} was built before tfamp.enable() or in another thread, or "
            f"loaded in another precision: its layers keep {', '.join(kept)} ({paths}"
            f"{', ...' * (len(layers) > _MOST_SHOWN)}), while {self._policy} is in "
            "force. Build it after tfamp.enable(), or call tfamp.set_precision on it.",
            stacklevel=6,
        )


def _is_built(model):
    """Whether a model and its layers are built; Keras says so too soon.

    `build` of a model that defines none marks the model alone as built.
    """
    used = model._called or all(each.built for each in model._flatten_layers())
    return model.built and used


def _is_being_made(model):
    """Whether the model's constructor, or Keras that loads it, compiles it.

    What it will be a part of may not be there yet: it is checked when it trains.
    """
    frame = inspect.currentframe()
    while frame is not None:
        names = frame.f_code.co_varnames
        if frame.f_code.co_name in ("__init__", "compile_from_config") and names:
            if frame.f_locals.get(names[0]) is model:
                return True
        frame = frame.f_back
    return False


def _build_by_tracing(model, iterator):
    """Traces a training step, which builds the model; returns the data, not drawn."""
    if isinstance(iterator, tf.data.Iterator):
        data = iterator.element_spec
    else:  # `train_on_batch` gives a generator of one batch.
        batches = list(iterator)
        data, iterator = batches[0], iter(batches)
    tf.function(model.train_step, autograph=False).get_concrete_function(data)
    return iterator


# ---- Under a graph rewrite ----


def _check_policies(model):
    low = [
        place.path
        for place in assign.walk(model)
        if place.layer.compute_dtype in assign.LOW
    ]
    if low:
        more = ", ..." if low[_MOST_SHOWN:] else ""
        raise ValueError(
            f"Model '{model.name}' has layers that compute in 16 bits by their dtype "
            f"policy ({', '.join(low[:_MOST_SHOWN])}{more}), while graphs are "
            "rewritten, too: TensorFlow accepts both and undoes float32 layers. Build "
            "the model under the float32 policy, or call "
            "tfamp.disable_graph_rewrite() first."
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
    if graph_rewrite.active() is not rewrite:  # It ended before the step.
        yield
        return
    with observe.observe(fresh) as graphs:
        yield
    report = observe.make_report(graphs)
    if report.effective is None:
        warnings.warn(f"Model '{model.name}': {report}", stacklevel=4)
    else:
        logging.info("Model '%s': %s", model.name, report)
    _seen = _reports[model][rewrite.config] = report
