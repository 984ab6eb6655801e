"""TensorFlow's automatic mixed precision graph rewrite: requested, and withdrawn.

The only writer of Grappler's options and of the rewrite's environment variables.

TensorFlow never says that a rewrite does not take place, so `enable` refuses what is
known to stop it, and `observe` shows what became of a graph. An option holds from the
next call on, for functions that were traced before, too.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp import checks
from tfamp.facts import hardware, switches, user_code
from tfamp.graph_rewrite.choice import choose_dtype

# NVIDIA's TensorFlow 1 reads these two; TensorFlow 2 reads neither.
FLAGS = (
    "TF_ENABLE_AUTO_MIXED_PRECISION",
    "TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRITE",
)
PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"
LISTS = ("allowlist", "inferlist", "denylist", "clearlist")
EDITS = tuple(f"{name}_{end}" for name in LISTS for end in ("add", "remove"))
TOGGLES = {
    "float16": "auto_mixed_precision",
    "bfloat16": "auto_mixed_precision_onednn_bfloat16",
}
MIN_NODES = "min_graph_nodes"
# In bfloat16 on a CPU, TensorFlow 2.21 adds up bias gradients in bfloat16 (up to 98 %
# wrong), and rounds losses and metrics.
FLOAT32_OPS = ("BiasAddGrad", "Mean", "Sum")


@dataclasses.dataclass(frozen=True)
class RewriteConfig:
    """The requested settings of the graph rewrite.

    Attributes:
      dtype: "auto", "bfloat16" or "float16".
      edits: Pairs of a keyword of `enable_graph_rewrite` and an operation.
    """

    dtype: str
    edits: frozenset[tuple[str, str]]

    @classmethod
    def from_keywords(cls, dtype: str, keywords: Mapping[str, Any]) -> "RewriteConfig":
        """Returns the config of what a user gives `enable_graph_rewrite`.

        Raises:
          TypeError: If a keyword is unknown, or no names; ValueError if an operation
            is unknown, which TensorFlow would ignore.
        """
        allowed = *EDITS, "float32_ops"
        checks.check_keywords("keywords for the graph rewrite", keywords, allowed)
        edits = set()
        for edit, ops in {"float32_ops": FLOAT32_OPS, **keywords}.items():
            expected = (
                f"`{edit}` must be names of tf.raw_ops. Received: {edit}={ops!r}."
            )
            if not isinstance(ops, Iterable):
                raise TypeError(expected)
            # `raw_ops` lacks the private ones, such as _FusedBatchNormEx.
            if any(op[0] != "_" and not hasattr(tf.raw_ops, op) for op in _split(ops)):
                raise ValueError(expected)
            edits.update((edit, op) for op in _split(ops))
        return cls(dtype, frozenset(edits))

    def merged(self, environ: Mapping[str, str | None]) -> dict[str, str | None]:
        """Returns the lists' variables for this config and those of the user.

        What is added to one list leaves the others: over an operation on two,
        TensorFlow silently gives up the whole rewrite.

        Raises:
          ValueError: If an operation is added to a list and removed from it, or added
            to another.
        """
        ops = {edit: {*_split(environ.get(_variable(edit)) or "")} for edit in EDITS}
        ops["float32_ops"] = set()
        for edit, op in self.edits:
            ops[edit].add(op)
        added = {name: ops[f"{name}_add"] for name in LISTS}
        float32_ops = ops["float32_ops"].difference(*added.values())
        for name in LISTS:
            removed = ops[f"{name}_remove"]
            removed.update(*(added[other] for other in LISTS if other != name))
            if both := added[name] & removed:
                raise ValueError(
                    f"{', '.join(sorted(both))}: added to the {name}, and removed from "
                    f"it or added to another list. Received: {sorted(self.edits)}, and "
                    f"environment variables {PREFIX}*."
                )
            removed.update(float32_ops if name != "denylist" else ())
        return {_variable(e): ",".join(sorted(ops[e])) or None for e in EDITS}


def _variable(edit):
    return PREFIX + edit.upper()


def _split(names):
    parts = names.split(",") if isinstance(names, str) else names
    return [part.strip() for part in parts if part.strip()]


class Snapshot(NamedTuple):
    """A state to which `restore` returns; None stands for unset."""

    active: "Rewrite | None"
    options: dict[str, Any]
    environ: dict[str, str | None]


class Rewrite(NamedTuple):
    """A request that is in force, and what stood before it."""

    config: RewriteConfig
    dtype: str  # "bfloat16" or "float16".
    reason: str
    before: Snapshot


_active: Rewrite | None = None


def active() -> Rewrite | None:
    """Returns the request in force, or None."""
    return _active


def requested_dtype() -> str | None:
    """Returns the dtype that `enable`, or else a Grappler option, asks for."""
    if _active:
        return _active.dtype
    options = _options()
    return next((dtype for dtype, name in TOGGLES.items() if options.get(name)), None)


def requested_by_environment() -> bool:
    """Whether the user set one of the two published environment flags to true.

    TensorFlow 2 reads neither. What `enable` itself sets does not count.

    Raises:
      ValueError: If one is set to something that is no bool.
    """
    environ = _before_all().environ
    values = {name: (environ[name] or "0").lower() for name in FLAGS}
    if not {"0", "false", "1", "true"}.issuperset(values.values()):
        raise ValueError(
            "The environment variables of the graph rewrite must be 1, true, 0 or "
            f"false, or unset. Received: {values}."
        )
    return not {"1", "true"}.isdisjoint(values.values())


def find_obstacle() -> str:
    """Returns what stops the requested rewrite; empty if nothing is known."""
    dtype, options = requested_dtype(), _options()
    if dtype is None:
        return (
            "no graph rewrite is enabled (TensorFlow 2 reads no environment flag; call "
            "tfamp.enable(..., graph_rewrite=True))"
        )
    if not options.get(TOGGLES[dtype]):
        return f"TensorFlow's option {TOGGLES[dtype]!r} is off"
    if options.get("disable_meta_optimizer"):
        return "TensorFlow's graph optimizers are switched off (disable_meta_optimizer)"
    return ""


def paused() -> contextlib.AbstractContextManager[None]:
    """Scopes calls of functions that TensorFlow is not to rewrite."""
    return _meanwhile(dict.fromkeys(TOGGLES.values(), False))


@contextlib.contextmanager
def _meanwhile(options) -> Iterator[None]:
    before = {name: _options().get(name) for name in options}
    tf.config.optimizer.set_experimental_options(options)
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options(before)


def _options():
    return tf.config.optimizer.get_experimental_options()


class _ChannelsLast:
    """Keeps TensorFlow from turning float32 images to channels first on a GPU.

    What is elementwise between two convolutions is turned with them, but not if it is
    a program, and it ends between two transposes (ResNet-50: 662 launches for 366).
    With TF32, cuDNN convolves channels last as well; in 16 bits they stay by default.
    """

    _OPTION = "layout_optimizer"
    is_set = False

    def install(self) -> None:
        """Sets the option, unless the user has; idempotent."""
        on_gpu = any(device.kind == "GPU" for device in hardware.read_devices())
        if on_gpu and _options().get(self._OPTION) is None:
            tf.config.optimizer.set_experimental_options({self._OPTION: False})
            self.is_set = True

    def remove(self) -> None:
        """Takes the option back; idempotent."""
        if self.is_set:
            tf.config.optimizer.set_experimental_options({self._OPTION: None})
            self.is_set = False


CHANNELS_LAST = _ChannelsLast()


def _before_all():
    """The state without any request, as the user left it."""
    state = snapshot()
    while state.active:
        state = state.active.before
    return state


def enable(config: RewriteConfig) -> Rewrite:
    """Asks TensorFlow to rewrite graphs, from the next call of any function on.

    Calling it again replaces the request.

    Raises:
      UnsupportedModeError: If the rewrite has no effect on this host.
      ValueError: If TensorFlow would ignore the request, or Keras' policy computes in
        16 bits. Nothing is changed then.
    """
    dtype, reason = choose_dtype(config.dtype, hardware.read_devices(), os.environ)
    policy = keras.config.dtype_policy()
    if policy.compute_dtype != "float32":
        raise ValueError(
            "Keras' global dtype policy must compute in float32. Received: "
            f"{policy.name}. TensorFlow accepts a mixed policy and the graph rewrite "
            "together, and undoes float32 layers then. Call "
            'keras.config.set_dtype_policy("float32") first, or leave the rewrite.'
        )
    environ = {**config.merged(_before_all().environ), **dict.fromkeys(FLAGS, "1")}
    if reason.startswith("warning:"):
        user_code.warn(reason)
    variables = {**os.environ, **environ}.items()
    setting = frozenset(each for each in variables if each[0].startswith(PREFIX))
    options = {name: each == dtype for each, name in TOGGLES.items()}
    options[MIN_NODES] = _number(setting)
    request = Rewrite(config, dtype, reason, snapshot())
    restore(Snapshot(request, options, environ))
    return request


def disable() -> None:
    """Puts back each option and variable as before the first `enable`; idempotent."""
    if _active:
        restore(_before_all())


def snapshot() -> Snapshot:
    """Returns the present state, for `restore`."""
    return Snapshot(
        _active,
        {name: _options().get(name) for name in (*TOGGLES.values(), MIN_NODES)},
        {name: os.environ.get(name) for name in (*FLAGS, *map(_variable, EDITS))},
    )


def restore(state: Snapshot) -> None:
    """Returns to a state that `snapshot` saw: another request's, or none's."""
    global _active
    _active = state.active
    switches.set_environ(state.environ)
    tf.config.optimizer.set_experimental_options(state.options)


_numbers: dict[Any, int] = {}


def _number(setting):
    """Returns a `min_graph_nodes` of a setting's own: below 0, no graph is too small.

    TensorFlow keeps what it makes of a function under the options alone, and reads the
    variables only then: so a change of lists reaches functions that ran before.
    """
    return _numbers.setdefault(setting, -2 - len(_numbers))


def optimized_anew() -> contextlib.AbstractContextManager[None]:
    """Meanwhile, each function that this thread calls is optimized once more.

    TensorFlow keeps both executables until the function is deleted.
    """
    return _meanwhile({MIN_NODES: _number(object())})


def sync_thread() -> None:
    """Makes the calling thread follow `enable` and `disable` of other threads.

    TensorFlow caches the options in each thread that has called a function.
    """
    tf.config.optimizer.set_experimental_options({})
