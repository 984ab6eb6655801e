"""What Keras' `compile` and a model's first training step show of the rewrite."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from absl import logging

from tfamp import errors, records
from tfamp.facts import formats, user_code
from tfamp.graph_rewrite import observe, switch
from tfamp.inspect import structure

_seen: observe.GraphRewriteReport | None = None


def last_report() -> observe.GraphRewriteReport | None:
    """Returns what a model's first training step last showed of the rewrite."""
    return _seen


def forget() -> None:
    """Forgets the last report: another rewrite, or none, is in force."""
    global _seen
    _seen = None


def check_policies(model: keras.Model) -> None:
    """Raises ValueError if layers compute in 16 bits by their dtype policy."""
    places = structure.walk(model)
    low = [x.path for x in places if x.layer.compute_dtype in formats.LOW]
    if low:
        raise ValueError(
            f"Model '{model.name}' has layers that compute in 16 bits by their dtype "
            f"policy ({errors.examples(low)}), and the graph rewrite is on: TensorFlow "
            "accepts both and undoes float32 layers. Build the model under the "
            "float32 policy, or call tfamp.disable_graph_rewrite() first."
        )


def keep_from_xla(model: keras.Model, arguments: dict[str, Any]) -> None:
    """Turns XLA off in arguments of `compile` where Keras would choose it."""
    if arguments["jit_compile"] == "auto":
        arguments["jit_compile"] = False  # On a GPU Keras 3.15 makes this True.
    options = {name: arguments[name] for name in ("run_eagerly", "jit_compile")}
    if any(options.values()):
        user_code.warn(
            f"Model '{model.name}' is not rewritten to 16 bits and trains in float32: "
            "the rewrite applies only to graphs, and not to those that XLA compiles. "
            "Received: "
            f"{', '.join(f'{name}={value}' for name, value in options.items())}. Leave "
            "both out, or use the dtype policy instead of the rewrite."
        )


def look(model: keras.Model, is_new: bool) -> Any:
    """Returns a context for a model's first step under a rewrite, else None."""
    global _seen
    rewrite = switch.active()
    if rewrite is None:
        return None
    switch.sync_thread()  # Another thread may have enabled the rewrite.
    check_policies(model)
    # TensorFlow keeps what it has optimized, and shows it no second time.
    reports = records.of(model).rewrites
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
    if switch.active() is not rewrite:  # It ended before the step.
        return
    report = observe.make_report(graphs)
    if report.effective is None:
        user_code.warn(f"Model '{model.name}': {report}")
    else:
        logging.info("Model '%s': %s", model.name, report)
    _seen = records.of(model).rewrites[rewrite.config] = report
