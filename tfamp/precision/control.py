"""`enable`, `disable`, `status`, and the graph rewrite by itself: what users call."""

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from absl import logging

from tfamp.graph_rewrite import switch
from tfamp.keras_patches import replicas
from tfamp.kernels import bias_gradient, install, long_attention
from tfamp.loss_scaling import train_steps
from tfamp.memory_saving import remat as rematerialization
from tfamp.precision import model_hooks, policy, promotion, settings
from tfamp.precision.status import Status, describe


class _Session(NamedTuple):
    """What `enable` did: for `status`, and for `disable` to undo."""

    asked: settings.Settings
    rewrite: switch.Rewrite | None
    before: policy.PrecisionState
    thread: threading.Thread


_session: _Session | None = None
_lock = threading.RLock()  # The session and the globals change together.


def _locked(function):
    @functools.wraps(function)
    def locked(*args, **kwargs):
        with _lock:
            return function(*args, **kwargs)

    return locked


def enable(
    mode: str = "auto",
    *,
    overrides: Mapping[str, str] | None = None,
    loss_scale: Mapping[str, Any] | Literal[False] | None = None,
    graph_rewrite: bool | Mapping[str, Any] | None = None,
    fused_kernels: bool = True,
    float32_outputs: bool = True,
    sum_embedding_gradients: bool = False,
    on_unsupported: Literal["raise", "warn"] = "raise",
    remat: Sequence[str] | None = None,
    optimizer_state: Literal["float32", "bfloat16", "8bit"] = "float32",
    weights: Literal["float32", "bfloat16"] = "float32",
) -> Status:
    """Sets the precision of models built from now on, and says why.

    Sets Keras' global dtype policy and TensorFlow's TF32 flag. From then on
    `model.compile("adam", ...)` gets loss scaling wherever a float16 layer trains, in
    an unchanged script; a `LossScaleOptimizer` that the user passes is never wrapped
    again, and a model that trains float16 layers without one gets a warning. Nothing
    but formats changes: optimizers and losses are Keras' in every mode.

    A model's layers get their precision when it is compiled or first called, from one
    plan, the same as `set_precision` has: outputs, softmax, raw values and a few others
    stay in float32 (`status().float32_layers`, `describe_layers`). So does an operation
    of TensorFlow where float32 and 16 bits meet, and what a model returns to code that
    calls it. A model built before, or loaded, keeps its precision, with a warning.

    Bias gradients in bfloat16 are summed rightly, which TensorFlow does not do on a
    CPU. Calling it again changes the mode; `disable` restores what stood before the
    first call. Keras' policy belongs to a thread: that which builds the models.

    Args:
      mode: "auto" for the fastest mode that is safe on this host, or "float32",
        "tf32", "mixed_bfloat16", "mixed_float16".
      overrides: Modes of single layers: a dict from a regular expression that
        matches a layer's whole path ("head" in a functional model, "model/head" in
        others) to a mode. They win over a layer's own `dtype`. A pattern that matches
        no layer of a compiled model, nor of one before, raises `OverrideError` there,
        or at its first training if that builds it. Models built before are not asked.
      loss_scale: Keywords of `LossScaleOptimizer` as a dict, or False for no loss
        scaling at all. None: the defaults.
      graph_rewrite: True: Keras' policy stays float32, and Grappler rewrites graphs to
        the format that `mode` names, as the first training step shows. A dict: with
        keywords of `enable_graph_rewrite`. None: True if
        `TF_ENABLE_AUTO_MIXED_PRECISION` or
        `TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRITE` is 1 in the environment.
      fused_kernels: Whether a mixed mode's dropout, GELU, SiLU, layer normalization
        and Adam update run as one compiled kernel each, in graphs on a CPU without
        XLA, which round once, and drop other elements than Keras would with the same
        seed; and whether long attention runs in linear memory, on any device.
      float32_outputs: Whether a model that user code, `fit` or `predict` calls returns
        outputs of 16 bits as float32. Models inside of others keep their format.
      sum_embedding_gradients: Whether an embedding's rows of one index are summed
        before an optimizer squares them, as in PyTorch. Keras squares each.
      on_unsupported: "raise", or "warn" to fall back to the nearest supported mode.
      remat: Patterns, as of `overrides`, of layers to compute again (`set_remat`).
      optimizer_state: How optimizers of compiled models store large slots (`low_bit`).
      weights: "bfloat16": under mixed_bfloat16 large weights are stored so from the
        first training step on, with updates that are rounded stochastically.

    Returns:
      A `Status`.

    Raises:
      ValueError: If the mode is unknown, a setting makes no sense, or the mode is not
        supported here (`UnsupportedModeError`). Nothing is changed then.

    Example:
      print(tfamp.enable(overrides={"head": "float32"}))
    """
    asked = settings.parse(
        _own_rewrite() is not None,
        mode,
        overrides,
        loss_scale,
        graph_rewrite,
        fused_kernels,
        float32_outputs,
        sum_embedding_gradients,
        on_unsupported,
        remat,
        optimizer_state,
        weights,
    )
    return _start(asked)


def _own_rewrite() -> switch.Rewrite | None:
    """Returns the session's graph rewrite, if it is the one in force."""
    own = _session and _session.rewrite
    return own if own is switch.active() else None


@_locked
def _start(asked: settings.Settings):
    global _session
    outer, now = _session, _read()
    before = outer.before if outer else now[0]
    try:
        policy.apply(asked.mode)
        if own := _own_rewrite():
            switch.restore(own.before)
        rewrite = asked.rewrite and switch.enable(asked.rewrite)
        _session = _Session(asked, rewrite, before, threading.current_thread())
        _refresh_hooks()
    except BaseException:
        _restore(outer, now)
        raise
    described = status()
    logging.info("tfamp.enable:\n%s", described)
    return described


@_locked
def disable() -> None:
    """Restores exactly what stood before the first `enable`; idempotent.

    Models that were built or compiled in between keep their precision and optimizer.
    What was traced keeps its bias gradients; what trains first later has TensorFlow's.
    """
    global _session
    if _session is None:
        return
    if own := _own_rewrite():
        switch.restore(own.before)
    policy.write(_session.before)
    _session = None
    _refresh_hooks()


@contextlib.contextmanager
def enabled(mode: str = "auto", **keywords: Any) -> Iterator[Status]:
    """Scopes `enable`: afterwards all is as before, an earlier `enable` included.

    Args:
      mode: As for `enable`.
      **keywords: As for `enable`.

    Yields:
      The `Status`.
    """
    outer, state = _session, _read()
    asked = settings.parse(_own_rewrite() is not None, mode, **keywords)
    try:
        yield _start(asked)
    finally:
        _restore(outer, state)


def _read():
    return policy.read(), switch.snapshot()


@_locked
def _restore(session, state):
    """Goes back to a session, or to none, and to the globals as they were then."""
    global _session
    _session, (precision, rewrite) = session, state
    if switch.active() is not rewrite.active:
        switch.restore(rewrite)
    policy.write(precision)
    _refresh_hooks()


def _refresh_hooks() -> None:
    """Installs, or removes, what goes with the session and the rewrite in force."""
    asked, rewrites = _session and _session.asked, switch.active() is not None
    # enable("float32") is stock Keras.
    mixed = asked is not None and asked.is_mixed
    if asked is not None or rewrites:
        model_hooks.install(asked)
    else:
        model_hooks.remove()
    # On a GPU none is used.
    fused = mixed and asked.fused_kernels and install.is_on_cpu()
    summed = asked is not None and asked.sum_embedding_gradients
    rewrite = switch.active()
    float16 = bool(asked and asked.has_float16)
    float16 |= rewrite is not None and rewrite.dtype == "float16"
    scaled = float16 and not (asked and asked.scaling is False)
    for hooks, wanted in (
        (bias_gradient.HOOKS, mixed or rewrites),
        (bias_gradient.EMBEDDING_HOOKS, summed),
        (install.HOOKS, fused),
        (long_attention.HOOKS, asked is not None),
        (long_attention.LAYER_HOOKS, mixed and asked.fused_kernels),
        (replicas.HOOKS, asked is not None),
        (promotion.HOOKS, mixed),
        (train_steps.HOOKS, scaled),
        (rematerialization.HOOKS, asked is not None),
    ):
        hooks.install() if wanted else hooks.remove()


def status() -> Status:
    """Returns what is requested, what is in force, and why they differ."""
    if _session is None:
        return describe(None, None)
    return describe(_session.asked, _session.rewrite, _session.thread)


# ---- The graph rewrite by itself ----


@_locked
def enable_graph_rewrite(dtype: str = "auto", **edits: Iterable[str] | str) -> Status:
    """Has TensorFlow rewrite graphs to 16 bits from the next call on.

    Keras' policy stays float32: so do weights, checkpoints, SavedModels and what
    functions return. Functions traced before follow, too; code outside of a
    `tf.function`, and what XLA compiles, does not. `compile` then turns XLA off where
    Keras would choose it, scales the loss under float16, and the first training step
    shows what was rewritten (`tfamp.status()`; a warning if nothing was). In a
    program without `fit`, `graph_rewrite_report` shows it.

    TensorFlow keeps the options of a thread that has called a function before: there,
    `sync_thread()` takes over the change.

    TensorFlow has four lists of operations:

    | list | its operations |
    |---|---|
    | `allowlist` | are converted always |
    | `inferlist` | are converted where their inputs are |
    | `clearlist` | go with their neighbors |
    | `denylist` | stay in float32, with those that depend on them |

    Args:
      dtype: "bfloat16" (CPUs), "float16" (NVIDIA GPUs of capability 7.0 or more), or
        "auto" for the one that is fast here.
      **edits: `allowlist_add`, `allowlist_remove` and so on, names of operations as in
        `tf.raw_ops`, in any iterable or in one string with commas; what is added to a
        list leaves the others. And `float32_ops`: operations that TensorFlow would
        rewrite and that stay in float32. The default keeps bias gradients (in bfloat16
        TensorFlow's are up to 98 % wrong on a CPU), losses and metrics; `()`:
        TensorFlow's own choice.

    Returns:
      A `Status`.

    Raises:
      ValueError: If the global dtype policy computes in 16 bits, or a setting makes no
        sense; `UnsupportedModeError` if the rewrite has no effect on this host.
        Nothing is changed then.

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


@_locked
def disable_graph_rewrite() -> None:
    """Restores every option and environment variable exactly; idempotent."""
    global _session
    switch.disable()
    if _session is not None:
        _session = _session._replace(rewrite=None)  # `disable` does not revive it.
    _refresh_hooks()


@contextlib.contextmanager
def graph_rewrite_scope(dtype: str = "auto", **keywords) -> Iterator[Status]:
    """Scopes `enable_graph_rewrite`: the calls made inside are rewritten.

    Not the functions defined inside: each call follows the options of its time. The
    options are the process's: scopes of several threads must not overlap.

    Args:
      dtype: As for `enable_graph_rewrite`.
      **keywords: As for `enable_graph_rewrite`.

    Yields:
      The `Status`.
    """
    before = switch.snapshot()
    try:
        yield enable_graph_rewrite(dtype, **keywords)
    finally:
        switch.restore(before)
        _refresh_hooks()
