"""What tfamp does when Keras compiles a model and runs its first training step."""

import contextlib
import dataclasses
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import keras
from absl import logging

from tfamp.graph_rewrite import report as rewrite_report
from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.loss_scaling import optimizer, unscaled
from tfamp.precision import (
    keras_hooks,
    layer_policies,
    model_structure,
    overrides,
)

_seen: rewrite_report.GraphRewriteReport | None = None


@dataclasses.dataclass
class _Looks:
    """What a model's training function showed.

    Attributes:
      reports: By TensorFlow's key of what it has optimized.
      again: Whether the next look has the function optimized once more, to see it.
    """

    reports: dict = dataclasses.field(default_factory=dict)
    again: bool = False


_looks: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def install(
    scaling: Mapping[str, Any] | Literal[False],
    resolver: layer_policies.Resolver | None,
) -> None:
    """Installs the rules from now on; installing again replaces them.

    - Loss scaling for the optimizer of a model that trains in float16, and a warning
      where one trains without.
    - Layers get their own modes before they are first used; patterns that match no
      layer raise.
    - While graphs are rewritten: Keras' own choice of `jit_compile` becomes False, as
      XLA would bypass the rewrite, and the first step is looked at.

    Args:
      scaling: Keywords of `LossScaleOptimizer`, or False for no loss scaling.
      resolver: Knows the modes of single layers; None if there are none.
    """

    def transform(model, given):
        # What the patterns match in a model that is not built is not known yet.
        late = resolver is not None and resolver.asks_for("mixed_float16")
        late = late and not model_structure.is_built(model)
        if scaling is False or not (late or unscaled.needs_loss_scale(model)):
            return given
        return optimizer.wrap_optimizer(given, **scaling)

    def rule(model, arguments):
        # What it will be a part of is made later: checked when it trains.
        if resolver is not None and not model_structure.makes_itself(model):
            layer_policies.check_model(model, resolver)
        if graph_rewrite.active() is not None:
            _check_policies(model)
            _keep_from_xla(model, arguments)

    def check_overrides(model):
        try:
            if resolver is not None:
                layer_policies.check_model(model, resolver)
        except overrides.OverrideError:
            model.train_function = None  # The next `fit` is a first one again.
            raise

    def around(model, is_new):
        context = _around_first_step(model, is_new)
        if resolver is None or not is_new or model_structure.is_built(model):
            return context
        return _followed(context, lambda: check_overrides(model))

    def check(model):
        check_overrides(model)
        if graph_rewrite.active() is not None:
            _check_policies(model)
        if scaling is not False:
            unscaled.warn_about_unscaled_optimizers(model)

    before_use = None if resolver is None else resolver.before_use
    keras_hooks.install(transform, check, rule, around, before_use)


@contextlib.contextmanager
def _followed(context, then):
    """A context, or none, with a function that is called at its end."""
    with context or contextlib.nullcontext():
        yield
    then()


def remove() -> None:
    """Puts Keras' own methods back; idempotent."""
    keras_hooks.remove()


def forget_report() -> None:
    """Forgets what the last first step showed: another rewrite is in force now."""
    global _seen
    _seen = None


def last_report() -> rewrite_report.GraphRewriteReport | None:
    """Returns what a model's first training step last showed of the rewrite."""
    return _seen


def _check_policies(model):
    low = [
        layer.path or layer.name
        for layer in model_structure.flatten_layers(model)
        if layer.compute_dtype in ("float16", "bfloat16")
    ]
    if low:
        raise ValueError(
            f"Model '{model.name}' has layers that compute in 16 bits by their dtype "
            f"policy ({', '.join(low[:5])}{', ...' if len(low) > 5 else ''}), while "
            "graphs are rewritten, too: TensorFlow accepts both and undoes float32 "
            "layers. Build the model under the float32 policy, or call "
            "tfamp.disable_graph_rewrite() first."
        )


def _keep_from_xla(model, arguments):
    if arguments["run_eagerly"]:
        _warn(model, "run_eagerly=True runs no graph", "run_eagerly=False")
    elif arguments["jit_compile"] == "auto":
        # On a GPU Keras 3.15 makes this True.
        arguments["jit_compile"] = False
        logging.info("Model '%s': jit_compile=False for the rewrite.", model.name)
    elif arguments["jit_compile"]:
        _warn(model, "XLA bypasses the graph rewrite", "jit_compile=False")


def _warn(model, reason, remedy):
    warnings.warn(
        f"Model '{model.name}' is not rewritten to 16 bits and trains in float32: "
        f"{reason}. Use compile({remedy}), or the dtype policy instead of the rewrite.",
        stacklevel=5,
    )


def _around_first_step(model, is_new):
    """Returns a context for a model's first step under a rewrite, else None."""
    global _seen
    rewrite = graph_rewrite.active()
    if rewrite is None:
        return None
    if graph_rewrite.thread_is_stale():
        # Another thread has enabled the rewrite; this one's options are older.
        graph_rewrite.sync_thread()
    if model.built:
        _check_policies(model)
    looks = _looks.setdefault(model, _Looks())
    if is_new:
        looks.reports.clear()
    # TensorFlow keeps what it has optimized, and shows it no second time.
    report = looks.reports.get(graph_rewrite.cache_key())
    if report is None:
        return _looked_at(model, looks, rewrite)
    _seen = report
    return None


@contextlib.contextmanager
def _looked_at(
    model: keras.Model, looks: _Looks, rewrite: graph_rewrite.Rewrite
) -> Iterator[None]:
    """Notes, and says, what the rewrite made of a model's first training step."""
    if graph_rewrite.active() is not rewrite:
        yield  # It ended before the step.
        return
    key, observation, failed = graph_rewrite.cache_key(), None, True
    try:
        with rewrite_report.observe(fresh=looks.again) as observation:
            yield
        failed = False
    finally:
        if observation is not None:
            report = observation.report(hints=_hints(model))
            _note(model, looks, key, report, failed)


def _note(model, looks, key, report, failed):
    global _seen
    if report.effective is None:
        unseen = not report.functions and not _hints(model) and not looks.again
        if failed or unseen:
            # It may have been optimized in a step before: the next one will tell.
            looks.again = True
            return
        warnings.warn(f"Model '{model.name}': {report}", stacklevel=4)
    else:
        logging.info("Model '%s': %s", model.name, report)
    _seen = looks.reports[key] = report
    looks.again = False


def _hints(model):
    if model.run_eagerly:
        return ["the model runs eagerly; compile it with run_eagerly=False"]
    if model.jit_compile:
        return [
            "the model is compiled by XLA, which bypasses the rewrite; compile it "
            "with jit_compile=False"
        ]
    return []
