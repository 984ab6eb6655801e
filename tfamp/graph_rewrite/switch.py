"""TensorFlow's automatic mixed precision graph rewrite: asked for, checked, undone.

The only writer of Grappler's options and of the rewrite's environment variables.

TensorFlow never says that a rewrite does not take place, so `enable` refuses what is
known to stop it, and `rewrite_report` shows what became of a graph. An option holds
from the next call on, for functions traced before, too; the environment is read when
a function is first run under an option, and is not part of the key under which
TensorFlow caches it. Therefore each set of variables has a number of its own here,
which goes into an option that means nothing else (`min_graph_nodes`).
"""

import contextlib
import itertools
import json
import os
import pathlib
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context  # TensorFlow 2.21

from tfamp import hardware
from tfamp.graph_rewrite import plan as rewrite_plan
from tfamp.graph_rewrite.plan import (
    FLAGS,
    FLOAT32_OPS,
    LOG_PATH,
    MIN_NODES,
    OLD_TOGGLE,
    PREFIX,
    TOGGLES,
    VARIABLES,
    RewriteConfig,
    choose_dtype,
)

__all__ = ["FLOAT32_OPS", "RewriteConfig", "choose_dtype"]

OPTIONS = (*TOGGLES.values(), OLD_TOGGLE, MIN_NODES)
SIMULATE_GPU = PREFIX + "SIMULATE_GPU"
# What TensorFlow describes under SIMULATE_GPU.
SIMULATED_GPU = hardware.DeviceDescription("GPU", "a simulated GPU", (8, 0))


class Globals(NamedTuple):
    """The globals that this module writes; None stands for unset.

    Attributes:
      options: Grappler option to value, for each of `OPTIONS`.
      environ: Environment variable to value, for each of `VARIABLES`.
    """

    options: dict[str, Any]
    environ: dict[str, str | None]


class Rewrite(NamedTuple):
    """A request that is in force.

    Attributes:
      config: The `RewriteConfig`.
      dtype: "bfloat16" or "float16".
      reason: Why this dtype.
      warnings: What the user should know, one sentence each.
      before: The globals before the first `enable`, to which `disable` returns.
    """

    config: RewriteConfig
    dtype: str
    reason: str
    warnings: tuple[str, ...]
    before: Globals


class Snapshot(NamedTuple):
    """A state to which `restore` returns.

    Attributes:
      active: The request in force, or None.
      found: The globals as they stood.
    """

    active: Rewrite | None
    found: Globals


_active: Rewrite | None = None
_lock = threading.RLock()
_new_number = itertools.count(-1_000_001, -1)  # No graph is too small for these.
_numbers: dict[tuple, int] = {}
# While graphs are dumped elsewhere: [the value that LOG_PATH has for everybody else].
_log_path_beneath: list[str | None] = []
# While functions are optimized anew: their number -> the one for everything else.
_number_beneath: dict[int, int | None] = {}


# ---- What is asked for ----


def float16_requested() -> bool:
    """Whether TensorFlow is asked to rewrite graphs to float16.

    Such a rewrite needs loss scaling as a float16 layer does, and no layer shows it.
    """
    options = tf.config.optimizer.get_experimental_options()
    return bool(options.get("auto_mixed_precision", False))


def requested_dtype() -> str | None:
    """Returns the dtype that `enable`, or else a Grappler option, asks for."""
    if _active:
        return _active.dtype
    options = tf.config.optimizer.get_experimental_options()
    if options.get(TOGGLES["bfloat16"]) or options.get(OLD_TOGGLE):
        return "bfloat16"
    return "float16" if options.get(TOGGLES["float16"]) else None


def requested_by_environment() -> bool:
    """Whether the user set one of the two published environment flags to true.

    TensorFlow 2 reads neither. What `enable` itself sets does not count.

    Raises:
      ValueError: If one is set to something that is no bool.
    """
    environ = _users_environ()
    return any([rewrite_plan.read_bool(environ, name) for name in FLAGS])


def active() -> Rewrite | None:
    """Returns the request in force, or None."""
    return _active


# ---- Enable, disable ----


def enable(config: RewriteConfig | None = None) -> Rewrite:
    """Asks TensorFlow to rewrite graphs, from the next call of any function on.

    Calling it again replaces the request.

    Args:
      config: A `RewriteConfig`; None for the defaults.

    Returns:
      A `Rewrite`. Its `warnings` were shown as one `UserWarning`.

    Raises:
      UnsupportedModeError: If the rewrite has no effect on this host.
      ValueError: If TensorFlow would ignore the request, or end the process over it;
        the message has all reasons. Nothing is changed then.
    """
    global _active
    with _lock:
        plan = make_plan(config or RewriteConfig())
        _make_log_folder(plan.environ[LOG_PATH])
        found = snapshot()
        before = _active.before if _active else found.found
        try:
            _write(Globals(_options_for(plan), plan.environ))
            _check_written(plan)
            _active = Rewrite(config or RewriteConfig(), *plan[:3], before)
            if plan.warnings:
                warnings.warn(" ".join(plan.warnings), stacklevel=3)
        except BaseException:
            restore(found)
            raise
        return _active


def disable() -> None:
    """Puts back each option and variable as before the first `enable`; idempotent."""
    with _lock:
        if _active:
            restore(Snapshot(None, _active.before))


def snapshot() -> Snapshot:
    """Returns the present state, for `restore`."""
    environ = {name: _read_variable(name) for name in VARIABLES}
    return Snapshot(_active, Globals(_read_options(), environ))


def restore(state: Snapshot) -> None:
    """Returns to a state that `snapshot` saw: another request's, or none's."""
    global _active
    with _lock:
        _write(state.found)
        _active = state.active


def make_plan(
    config: RewriteConfig,
    devices: Sequence[hardware.DeviceDescription] | None = None,
) -> rewrite_plan.Plan:
    """Returns what a request comes to, given the user's own variables.

    Args:
      config: A `RewriteConfig`.
      devices: The devices to decide for; None: this host's.

    Returns:
      A `Plan`.

    Raises:
      UnsupportedModeError: If the rewrite has no effect on these devices.
      ValueError: If something else stands against it.
    """
    return rewrite_plan.make_plan(
        config,
        hardware.read_devices() if devices is None else devices,
        _users_environ(),
        tf.config.optimizer.get_experimental_options(),
    )


def find_obstacles(dtype: str) -> list[str]:
    """Returns what stops a rewrite to `dtype` as options and variables now stand."""
    options = tf.config.optimizer.get_experimental_options()
    devices = hardware.read_devices()
    return rewrite_plan.find_obstacles(dtype, devices, os.environ, options)


def _make_log_folder(path):
    if path is None:
        return
    try:
        pathlib.Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"The folder for TensorFlow's graph dumps cannot be made ({error}). "
            f"Received: log_path={path!r}. Give another `log_path` or {LOG_PATH}."
        ) from error


# ---- Reading and writing ----


def _users_environ():
    """Returns the environment without what `enable` set in it."""
    environ = {name: value for name, value in os.environ.items()}
    ours = _active.before.environ if _active else {}
    for name in VARIABLES:
        value = ours[name] if ours else _read_variable(name)
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
    inherited = environ.pop(rewrite_plan.REPLACED, None)
    for name, value in json.loads(inherited or "{}").items():
        # Of a parent process that had enabled a rewrite.
        environ.pop(name, None)
        if value is not None:
            environ[name] = value
    for name in FLAGS:
        if environ.get(name) == "":  # As a shell unsets one for a single command.
            del environ[name]
    return environ


def _read_options():
    options = tf.config.optimizer.get_experimental_options()
    number = options.get(MIN_NODES)
    return {
        **{name: options.get(name) for name in OPTIONS},
        MIN_NODES: _number_beneath.get(number, number),
    }


def _read_variable(name):
    if name == LOG_PATH and _log_path_beneath:
        return _log_path_beneath[0]
    return os.environ.get(name)


def _write_variable(name, value):
    if name == LOG_PATH and _log_path_beneath:
        _log_path_beneath[0] = value
    elif value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _write(state):
    for name, value in state.environ.items():
        _write_variable(name, value)
    tf.config.optimizer.set_experimental_options(state.options)


def _options_for(plan):
    return {
        **{name: dtype == plan.dtype for dtype, name in TOGGLES.items()},
        OLD_TOGGLE: False,
        MIN_NODES: _number_of(plan.environ),
    }


def _number_of(environ):
    # IGNORE_PERFORMANCE is read once in a process, these never.
    unread = (*FLAGS, rewrite_plan.REPLACED)
    key = tuple(sorted((k, v) for k, v in environ.items() if v and k not in unread))
    if key not in _numbers:
        _numbers[key] = next(_new_number)
    return _numbers[key]


def cache_key() -> tuple:
    """Returns TensorFlow's key of what it has optimized under the present request."""
    return requested_dtype(), _read_options()[MIN_NODES]


def _check_written(plan):
    options = tf.config.optimizer.get_experimental_options()
    wrong = {
        name: options.get(name)
        for name, value in _options_for(plan).items()
        if options.get(name) != value
    }
    if wrong:
        raise RuntimeError(
            "TensorFlow did not take the options of the graph rewrite. Received: "
            f"{wrong}, expected {_options_for(plan)}. tfamp is made for TensorFlow "
            f"2.21; this is {tf.__version__}."
        )


# ---- Scopes for observing and previewing ----


def log_folder() -> str | None:
    """Returns the folder that the user, or `enable`, gave for TensorFlow's dumps."""
    return _read_variable(LOG_PATH)


@contextlib.contextmanager
def dumping_to(folder: str) -> Iterator[None]:
    """Meanwhile, TensorFlow dumps each graph that it rewrites into `folder`.

    `enable` and `disable` may be called inside. Not to be nested.
    """
    with _lock:
        _log_path_beneath.append(os.environ.get(LOG_PATH))
        os.environ[LOG_PATH] = folder
    try:
        yield
    finally:
        with _lock:
            beneath = _log_path_beneath.pop()
            _write_variable(LOG_PATH, beneath)


@contextlib.contextmanager
def optimized_anew() -> Iterator[None]:
    """Meanwhile, each function that this thread calls is optimized once more.

    TensorFlow keeps both executables until the function is deleted.
    """
    number = next(_new_number)
    _number_beneath[number] = _read_options()[MIN_NODES]
    tf.config.optimizer.set_experimental_options({MIN_NODES: number})
    try:
        yield
    finally:
        # `enable` or `disable` may have been called.
        now = _read_options()
        del _number_beneath[number]
        tf.config.optimizer.set_experimental_options({MIN_NODES: now[MIN_NODES]})


@contextlib.contextmanager
def previewing(
    plan: rewrite_plan.Plan, simulate_gpu: bool = False
) -> Iterator[dict[str, Any]]:
    """Meanwhile, the environment is as a plan wants it; no option is changed.

    Args:
      plan: A `Plan`.
      simulate_gpu: Whether TensorFlow shall pretend a GPU of capability 8.0.

    Yields:
      Grappler options with which to optimize a graph.
    """
    wanted: Mapping[str, str | None] = {
        name: value for name, value in plan.environ.items() if name != LOG_PATH
    }
    if simulate_gpu:
        wanted = {**wanted, SIMULATE_GPU: "1"}
    with _lock:
        found = {name: os.environ.get(name) for name in wanted}
        try:
            for name, value in wanted.items():
                _write_variable(name, value)
            options = tf.config.optimizer.get_experimental_options()
            yield {**options, **_options_for(plan)}
        finally:
            for name, value in found.items():
                _write_variable(name, value)


# ---- Threads ----


def sync_thread() -> None:
    """Makes the calling thread follow `enable` and `disable` of other threads.

    TensorFlow caches the options in each thread that has called a function.
    """
    tf.config.optimizer.set_experimental_options({})


def thread_is_stale() -> bool:
    """Whether the calling thread still holds other options than are in force."""
    # TensorFlow 2.21; guarded by tests/test_rewrite_contract.py.
    process: Any = context.context()
    held = process._thread_local_data.function_call_options
    if held is None:
        return False
    cached = config_pb2.ConfigProto.FromString(held.config_proto_serialized)
    now = process.config.graph_options.rewrite_options
    return cached.graph_options.rewrite_options != now
