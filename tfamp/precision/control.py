"""`enable`, `disable`, `status`, and the graph rewrite by itself: what users call."""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from absl import logging

from tfamp.facts import xla_flags as flags_of_xla
from tfamp.graph_rewrite import switch
from tfamp.keras_patches import replicas
from tfamp.kernels import bias_gradient, clusters, install, long_attention
from tfamp.loss_scaling import train_steps
from tfamp.operators import lost_numbers, promotion, reductions
from tfamp.precision import model_hooks, policy
from tfamp.precision.settings import OFF, Options, Settings, parse
from tfamp.precision.status import NOTES, Status, describe
from tfamp.storage import remat as rematerialization
from tfamp.updates import compiled


class _Session(NamedTuple):
    """What `enable` did: for `status`, and for `disable` to undo."""

    settings: Settings
    rewrite: switch.Rewrite | None
    before: policy.PrecisionState
    thread: threading.Thread


_session: _Session | None = None
_lock = threading.RLock()  # The session and the globals change together.


@contextlib.contextmanager
def _locked():
    with _lock:
        yield


def enable(
    mode: str = "auto",
    *,
    overrides: Mapping[str, str] | None = None,
    loss_scale: Mapping[str, Any] | Literal[False] | None = None,
    graph_rewrite: bool | Mapping[str, Any] | None = None,
    fused_kernels: bool | None = None,
    float32_outputs: bool = True,
    sum_embedding_gradients: bool = False,
    on_unsupported: Literal["raise", "warn"] = "raise",
    remat: Sequence[str] | None = None,
    optimizer_state: Literal["float32", "bfloat16", "8bit"] = "float32",
    weights: Literal["float32", "bfloat16"] = "float32",
    xla_flags: bool = True,
    heal: bool = True,
) -> Status:
    """Sets the precision of models built from now on, and returns why it was chosen.

    It sets Keras' global dtype policy and TensorFlow's TF32 flag. From then on
    `compile("adam", ...)` adds loss scaling wherever a float16 layer trains, unless the
    optimizer has it. A model that trains float16 layers without gets a warning.

    A model's layers get their precision when it is compiled or first called, by the
    plan of `set_precision`. Outputs, softmax, raw values and a few others stay in
    float32 (`status().float32_layers`, `describe_layers`). TensorFlow operations where
    float32 and 16 bits meet are computed in float32. A model returns float32 to its
    caller. Models built before, or loaded, keep their precision, with a warning.

    Call it again to change the mode; `disable` restores the state before the first
    call. Call it in the thread that builds models, on a GPU before all else.

    Args:
      mode: "auto" for the mode that this host has units for (docs/hardware.md), or
        "float32", "tf32", "mixed_bfloat16", "mixed_float16", "float8".
      overrides: Modes of single layers: {regular expression: mode}. A pattern matches
        the path of a layer, or its end after a `/` ("head" matches "head" and
        "sequential/head"), and wins over its `dtype`. One that matches no layer of a
        compiled model, or an earlier one, raises `OverrideError` in `compile`, or at
        the first training.
      loss_scale: Keywords of `LossScaleOptimizer` as a dict, or False for no loss
        scaling at all. None: the defaults.
      graph_rewrite: True: Keras' policy stays float32, and Grappler rewrites graphs to
        the format of `mode`; the first training step reports it. A dict: keywords of
        `enable_graph_rewrite`. None: True if TF_ENABLE_AUTO_MIXED_PRECISION is 1, or
        TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRITE.
      fused_kernels: Whether updates of weights and small operators are compiled into
        few programs, in graphs without XLA (docs/kernels.md), and long attention takes
        linear memory. Dropout drops other elements than Keras with the same seed. None:
        in tf32 and the mixed modes; True: in float32, too; False: nowhere.
      float32_outputs: Whether a model called by user code, `fit` or `predict` returns
        16-bit outputs as float32. Models inside other models keep their format.
      sum_embedding_gradients: Whether an embedding's gradient rows of one index are
        summed before an optimizer squares them, as in PyTorch. Keras squares each.
      on_unsupported: "raise", or "warn" to fall back to the nearest supported mode.
      remat: Patterns, as in `overrides`, of layers to recompute (`set_remat`).
      optimizer_state: How optimizers of compiled models store large slots (`low_bit`).
      weights: "bfloat16": under mixed_bfloat16, store large weights in bfloat16 from
        the first training step on, with stochastically rounded updates.
      xla_flags: Whether XLA on an NVIDIA GPU gets flags with which it compiles faster,
        and a folder that keeps what it compiled (docs/gpu.md).
      heal: Whether `fit` sets layers that overflow float16 to float32, and warns;
        False: it only warns.

    Returns:
      A `Status`.

    Raises:
      ValueError: If the mode is unknown, a setting is invalid, or the mode is not
        supported here (`UnsupportedModeError`). Nothing is changed.

    Example:
      print(tfamp.enable(overrides={"head": "float32"}))
    """
    return _start(Options(**locals()))


def _own_rewrite() -> switch.Rewrite | None:
    """Returns the session's graph rewrite, if it is the one in force."""
    own = _session and _session.rewrite
    return own if own is switch.active() else None


@_locked()
def _start(options: Options):
    global _session
    settings = parse(options, _own_rewrite() is not None)
    outer, now = _session, _read()
    before = outer.before if outer else now[0]
    try:
        policy.write(policy.state_of(settings.mode))
        if own := _own_rewrite():
            switch.restore(own.before)
        rewrite = settings.rewrite and switch.enable(settings.rewrite)
        _session = _Session(settings, rewrite, before, threading.current_thread())
        _refresh_hooks()
    except BaseException:
        _restore(outer, now)
        raise
    described = status()
    logging.info("tfamp.enable:\n%s", described.full())
    return described


@_locked()
def disable() -> None:
    """Restores the state before the first `enable` exactly; idempotent.

    Models that were built or compiled in between keep their precision and optimizer,
    traced functions their bias gradients, and XLA the flags that it has read.
    """
    if _session is not None:
        own = _own_rewrite()
        rewrite = own.before if own else switch.snapshot()
        _restore(None, (_session.before, rewrite))


@contextlib.contextmanager
def enabled(mode: str = "auto", **keywords: Any) -> Iterator[Status]:
    """Scopes `enable`: afterwards all is as before, an earlier `enable` included.

    Args:
      mode, **keywords: As for `enable`.

    Yields:
      The `Status`.

    Raises:
      ValueError: As `enable`; nothing is changed.

    Example:
      with tfamp.enabled("mixed_float16"):
          train(build_model())
    """
    outer, state = _session, _read()
    try:
        yield _start(Options(mode, **keywords))
    finally:
        _restore(outer, state)


def _read():
    return policy.read(), switch.snapshot()


@_locked()
def _restore(session, state):
    """Goes back to a session, or to none, and to the globals as they were then."""
    global _session
    precision, rewrite = state
    if switch.active() is not rewrite.active:
        switch.restore(rewrite)
    policy.write(precision)
    _session = session  # Last: what was interrupted can be called again.
    _refresh_hooks()


def _refresh_hooks() -> None:
    """Installs, or removes, what goes with the session and the rewrite in force."""
    NOTES.clear()
    settings, rewrite = _session.settings if _session else OFF, switch.active()
    options, mixed, fuses = settings.options, settings.is_mixed, settings.fuses_layers
    if _session or rewrite:
        model_hooks.install(settings)
    else:
        model_hooks.remove()
    float16 = settings.has_float16 or rewrite and rewrite.dtype == "float16"
    for hooks, wanted in (
        (bias_gradient.HOOKS, mixed or rewrite),
        (bias_gradient.EMBEDDING_HOOKS, options.sum_embedding_gradients),
        (compiled.HOOKS, settings.fuses_updates),
        (install.HOOKS, fuses),
        (clusters.HOOKS, fuses),
        (long_attention.HOOKS, _session),
        (long_attention.LAYER_HOOKS, mixed and fuses),
        (replicas.HOOKS, _session),
        (promotion.HOOKS, mixed),
        (lost_numbers.HOOKS, mixed),
        (reductions.HOOKS, mixed),
        (train_steps.HOOKS, float16 and settings.scaling is not False),
        (rematerialization.HOOKS, _session),
        (flags_of_xla, options.xla_flags),
        (switch.CHANNELS_LAST, fuses and settings.mode.name == "tf32"),
    ):
        hooks.install() if wanted else hooks.remove()


def status() -> Status:
    """Returns what is requested, what is in force, and why they differ."""
    if _session is None:
        return describe(OFF, None)
    return describe(_session.settings, _session.rewrite, _session.thread)


# ---- The graph rewrite by itself ----


@_locked()
def enable_graph_rewrite(dtype: str = "auto", **edits: Iterable[str] | str) -> Status:
    """Makes TensorFlow rewrite graphs to 16 bits from the next call on.

    Keras' policy stays float32, and so do weights, files and the results of functions.
    Functions traced before are rewritten, too. Code outside a `tf.function` and code
    compiled by XLA are not, so `compile` turns XLA off where Keras would choose it. It
    also scales the loss under float16. The first training step reports what was
    rewritten (`tfamp.status()`), with a warning if nothing was; without `fit`, use
    `graph_rewrite_report`.

    TensorFlow caches the options in each thread that has called a function; call
    `sync_thread()` there.

    TensorFlow has four lists of operations:

    | list | its operations |
    |---|---|
    | `allowlist` | are always converted |
    | `inferlist` | are converted where their inputs are |
    | `clearlist` | follow their neighbors |
    | `denylist` | stay in float32, with those that depend on them |

    Args:
      dtype: "bfloat16" (CPUs), "float16" (NVIDIA GPUs of capability 7.0 or more), or
        "auto" for the one that this host has units for.
      **edits: `allowlist_add`, `allowlist_remove` and so on: names of operations as in
        `tf.raw_ops`, in an iterable or a string with commas. Adding to one list removes
        from the others. Also `float32_ops`: operations that TensorFlow would rewrite
        but that stay in float32. The default is bias gradients (up to 98 % wrong in
        bfloat16 on a CPU), losses and metrics; `()` is TensorFlow's own choice.

    Returns:
      A `Status`.

    Raises:
      ValueError: If the global dtype policy computes in 16 bits, or a setting is
        invalid; `UnsupportedModeError` if the rewrite has no effect on this host.
        Nothing is changed.

    Example:
      print(tfamp.enable_graph_rewrite())
    """
    before = switch.snapshot()
    try:
        switch.enable(switch.RewriteConfig.from_keywords(dtype, edits))
        _refresh_hooks()
    except BaseException:
        switch.restore(before)
        raise
    return status()


@_locked()
def disable_graph_rewrite() -> None:
    """Restores all options and environment variables exactly; idempotent."""
    global _session
    switch.disable()
    if _session is not None:
        _session = _session._replace(rewrite=None)  # `disable` does not revive it.
    _refresh_hooks()


@contextlib.contextmanager
def graph_rewrite_scope(dtype: str = "auto", **keywords) -> Iterator[Status]:
    """Rewrites calls that are made inside the scope, as `enable_graph_rewrite` does.

    A function follows the options at the time of its call, not of its definition. The
    options belong to the process: scopes of several threads must not overlap.

    Args:
      dtype: As in `enable_graph_rewrite`.
      **keywords: As in `enable_graph_rewrite`.

    Yields:
      The `Status`.
    """
    before = switch.snapshot()
    try:
        yield enable_graph_rewrite(dtype, **keywords)
    finally:
        switch.restore(before)
        _refresh_hooks()
