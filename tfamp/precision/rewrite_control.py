"""The graph rewrite by itself: switch it on, off, and for the calls in a block."""

import contextlib
from collections.abc import Iterable, Iterator

from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.precision import control


def enable_graph_rewrite(
    dtype: str = "auto",
    *,
    level: str | None = None,
    allowlist_add: Iterable[str] | str = (),
    allowlist_remove: Iterable[str] | str = (),
    inferlist_add: Iterable[str] | str = (),
    inferlist_remove: Iterable[str] | str = (),
    denylist_add: Iterable[str] | str = (),
    denylist_remove: Iterable[str] | str = (),
    clearlist_add: Iterable[str] | str = (),
    clearlist_remove: Iterable[str] | str = (),
    float32_ops: Iterable[str] | str = graph_rewrite.FLOAT32_OPS,
    log_path: str | None = None,
) -> control.Status:
    """Has TensorFlow rewrite graphs to 16 bits from the next call on.

    Keras' policy stays float32: so do weights, checkpoints, SavedModels and what
    functions return. Functions traced before follow, too; code outside of a
    `tf.function`, and what XLA compiles, does not. `compile` then turns XLA off where
    Keras would choose it, scales the loss under float16, and the first training step
    shows what was rewritten (`tfamp.status()`; a warning if nothing was). In a
    program without `fit`, `graph_rewrite_report` shows it.

    TensorFlow keeps the options of a thread that has called a function before: there,
    `sync_thread()` takes over the change.

    Args:
      dtype: "bfloat16" (CPUs), "float16" (NVIDIA GPUs of capability 7.0 or more), or
        "auto" for the one that is fast here.
      level: None, "TREAT_INFER_AS_DENY", "TENSOR_CORES_ONLY" or "UNSAFE_FORCE_ALL";
        the last two have a meaning for float16 only.
      allowlist_add: Operations to compute in 16 bits, as `tf.raw_ops` names them.
      allowlist_remove: Operations to take off that list.
      inferlist_add: Operations that follow those around them.
      inferlist_remove: Operations to take off that list.
      denylist_add: Operations to keep in float32, with those that depend on them.
      denylist_remove: Operations to take off that list.
      clearlist_add: Operations without an effect on numerics.
      clearlist_remove: Operations to take off that list.
      float32_ops: Operations that TensorFlow would rewrite and that stay in float32.
        The default keeps bias gradients (in bfloat16 TensorFlow's are up to 98 %
        wrong on a CPU), losses and metrics. `()`: TensorFlow's own choice.
      log_path: Folder for TensorFlow's dumps of each graph, before and after.

    Returns:
      A `Status`.

    Raises:
      ValueError: If the global dtype policy computes in 16 bits, or a setting makes no
        sense; `UnsupportedModeError` if the rewrite has no effect on this host.
        Nothing is changed then.

    Example:
      print(tfamp.enable_graph_rewrite())
    """
    keywords, before = locals(), graph_rewrite.snapshot()
    try:
        graph_rewrite.enable(graph_rewrite.RewriteConfig(**keywords))
        control.refresh_hooks()
    except BaseException:
        graph_rewrite.restore(before)
        raise
    return control.status()


def disable_graph_rewrite() -> None:
    """Restores every option and environment variable exactly; idempotent."""
    control.end_rewrite()


@contextlib.contextmanager
def graph_rewrite_scope(dtype: str = "auto", **keywords) -> Iterator[control.Status]:
    """Scopes `enable_graph_rewrite`: the calls made inside are rewritten.

    Not the functions defined inside: each call follows the options of its time. The
    options are the process's: scopes of several threads must not overlap.

    Args:
      dtype: As for `enable_graph_rewrite`.
      **keywords: As for `enable_graph_rewrite`.

    Yields:
      The `Status`.
    """
    before = graph_rewrite.snapshot()
    try:
        yield enable_graph_rewrite(dtype, **keywords)
    finally:
        graph_rewrite.restore(before)
        control.refresh_hooks()
