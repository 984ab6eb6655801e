"""What the tests share: the process' globals, and small models of the peers' rules."""

import contextlib
import importlib.util
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
import workers
from tensorflow.python.distribute import mirrored_strategy

import tfamp
from tfamp.facts import hardware
from tfamp.keras_patches import patches
from tfamp.kernels import bias_gradient, clusters, install, long_attention
from tfamp.loss_scaling import rule as loss_scale
from tfamp.operators import lost_numbers, promotion
from tfamp.precision import model_hooks
from tfamp.updates import compiled

# ---- The process' globals, as conftest.py saves, compares and restores them ----

HOOKED = (
    "compile",
    "make_train_function",
    "__call__",
    "_open_name_scope",
    "from_config",
    "build_from_config",
)


class Globals(NamedTuple):
    """What a test must leave as it found it, in the test's thread.

    `methods` are what each class above `keras.Model` defines as one of `HOOKED`, None
    where it defines nothing, and the functions that `tfamp.kernels` replaces.
    """

    dtype_policy: keras.dtype_policies.DTypePolicy
    tensor_float_32: bool
    grappler: dict[str, Any]
    environ: dict[str, str]
    methods: dict[tuple[type, str], Callable | None]


_PATCHED = [(x.find(), x.name) for x in patches.BY_NAME.values()]
_SET_BY_PYTEST = "PYTEST_CURRENT_TEST"  # Differs between set-up, call and tear-down.


def read_globals() -> Globals:
    """Returns the globals as they stand."""
    return Globals(
        keras.config.dtype_policy(),
        tf.config.experimental.tensor_float_32_execution_enabled(),
        tf.config.optimizer.get_experimental_options(),
        {k: v for k, v in os.environ.items() if k != _SET_BY_PYTEST},
        {
            (base, name): vars(base).get(name)
            for base in keras.Model.__mro__
            for name in HOOKED
        }
        | {(owner, name): vars(owner)[name] for owner, name in _PATCHED if owner},
    )


def write_globals(saved: Globals) -> None:
    """Sets the globals to what `read_globals` returned before."""
    keras.config.set_dtype_policy(saved.dtype_policy)
    tf.config.experimental.enable_tensor_float_32_execution(saved.tensor_float_32)
    now = read_globals()
    # None, and not False, takes an option back to TensorFlow's default.
    options = {**dict.fromkeys(now.grappler), **saved.grappler}
    tf.config.optimizer.set_experimental_options(options)
    for name in now.environ.keys() - saved.environ.keys():
        del os.environ[name]
    os.environ.update(saved.environ)
    for module in (bias_gradient, clusters, compiled, install, long_attention):
        module.HOOKS.remove()
    bias_gradient.EMBEDDING_HOOKS.remove()
    long_attention.LAYER_HOOKS.remove()
    lost_numbers.HOOKS.remove()
    promotion.HOOKS.remove()
    model_hooks.remove()
    for (base, name), function in saved.methods.items():
        if vars(base).get(name) is function:
            continue
        if function is None:
            delattr(base, name)
        else:
            setattr(base, name, function)


def find_leaks(before: Globals, after: Globals) -> list[str]:
    """Returns one line for each global that differs."""
    old, new = _named(before), _named(after)
    return [
        f"{name}: {old.get(name)!r} became {new.get(name)!r}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def _named(found):
    return {
        "dtype policy": found.dtype_policy.name,  # Keras 3.15 cannot compare two maps.
        "TF32 flag": found.tensor_float_32,
        **{f"Grappler option {key}": x for key, x in found.grappler.items()},
        **{f"environment variable {key}": x for key, x in found.environ.items()},
        **{f"{owner.__name__}.{key}": x for (owner, key), x in found.methods.items()},
    }


def describe_support() -> str:
    """Returns this host's precision support as one phrase, for skip reasons."""
    return str(hardware.detect_support())


@contextlib.contextmanager
def enabled(mode: str, **keywords) -> Iterator[Any]:
    """Scopes `tfamp.enable`."""
    try:
        yield tfamp.enable(mode, **keywords)
    finally:
        tfamp.disable()


@contextlib.contextmanager
def enabled_without_tf32(mode: str) -> Iterator[None]:
    """Scopes `tfamp.enable`, for values that are compared with float32's on a GPU."""
    with enabled(mode):
        tf.config.experimental.enable_tensor_float_32_execution(False)
        yield


@contextlib.contextmanager
def as_if_on_a_gpu(mode, **keywords):
    """Scopes `tfamp.enable` for an H100; XLA compiles the programs for this CPU."""
    with (
        hardware.simulated(hardware.DEVICES["h100"]),
        enabled(mode, **keywords) as status,
    ):
        yield status


# ---- What many tests do ----

LOW = {"mixed_bfloat16": tf.bfloat16, "mixed_float16": tf.float16}
in_both = pytest.mark.parametrize("mode", LOW)


def assert_equal(found: Iterable, expected: Iterable, **tolerances: float) -> None:
    """Asserts that arrays are equal: bit for bit, or to `rtol` and `atol`."""
    check = np.testing.assert_allclose if tolerances else np.testing.assert_array_equal
    for one, other in zip(found, expected, strict=True):
        check(one, other, err_msg=getattr(one, "path", ""), **tolerances)


def value_and_gradient(function: Callable, **keywords: Any) -> Callable:
    """Returns a function of tensors: what the given one returns, and its gradients."""

    def run(*inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = function(*inputs)
        gradients = tape.gradient(y, inputs, **keywords)
        return y, gradients if len(inputs) > 1 else gradients[0]

    return run


def policies(model: keras.Model) -> dict[str, str]:
    """Returns {path: policy} of a model and its layers."""
    return {row.path: row.policy for row in tfamp.describe_layers(model)}


COMPILED = {"auto_scale_loss", "jit_compile", "metrics", "run_eagerly"}
COMPILED |= {"steps_per_execution"}


def fit(model: keras.Model, x, y=None, optimizer="sgd", loss="mse", **keywords):
    """Compiles and trains a model in silence; returns the losses of its epochs."""
    compiled = {name: keywords.pop(name) for name in COMPILED & {*keywords}}
    model.compile(optimizer, loss, **compiled)
    return model.fit(x, y, **{"verbose": 0, **keywords}).history["loss"]


@contextlib.contextmanager
def unmerged_replicas() -> Iterator[None]:
    """Scopes the path of XLA on GPUs, whose collectives a CPU runs in a plain graph."""
    owner = mirrored_strategy.MirroredExtended
    with mock.patch.object(owner, "_use_merge_call", lambda self: False):
        yield


# ---- `-m device` ----


def names_of(
    table: Iterable,
    quick: Iterable | None = None,
    slow: Iterable = (),
    device: Iterable = (),
) -> list:
    """Returns parameters of a test.

    Args:
      table: Their names.
      quick: Those that the default run takes; the others are `-m training`, unless they
        are `slow`. None for all.
      slow: Those of `-m slow`.
      device: Those of `-m device`.
    """
    table = [*table]
    marks = {"slow": slow, "device": device}
    if quick is not None:
        marks["training"] = [name for name in table if name not in (*quick, *slow)]

    def of(name):
        return [getattr(pytest.mark, mark) for mark in marks if name in marks[mark]]

    def text(name):
        return getattr(name, "__name__", str(name))

    return [pytest.param(name, id=text(name), marks=of(name)) for name in table]


def whole_runs(rows: Iterable[tuple], mark=pytest.mark.training) -> list:
    """Returns rows of a test's table that only `-m training`, or `-m slow`, takes."""
    return [pytest.param(*row, marks=mark) for row in rows]


def roundings(mode: str, count: float = 4) -> float:
    """Returns the tolerance of a training in a mode that runs twice.

    It is none on a CPU. A GPU adds in any order: so many roundings of the mode.
    """
    name = {"mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}.get(mode)
    is_gpu = bool(tf.config.list_physical_devices("GPU"))
    return is_gpu * count * tfamp.float_format(name or "float32").epsilon


# ---- The loss scale ----


def warned(caught: Iterable[Any]) -> list[str]:
    """Returns the texts that were warned of, without NumPy's of TensorFlow 2.20."""
    ours = [each for each in caught if each.category is not DeprecationWarning]
    return [str(each.message) for each in ours]


def as_tensors(state: loss_scale.LossScaleState) -> loss_scale.LossScaleState:
    """Returns a state of Python numbers as scalar tensors."""
    return loss_scale.LossScaleState(
        tf.constant(state.scale, "float32"),
        *(tf.constant(field, loss_scale.COUNTER_DTYPE) for field in state[1:]),
    )


# How a function of tensors is run.
RUNNERS: dict[str, Callable] = {
    "eager": lambda f: f,
    "graph": tf.function,
    "xla": lambda f: tf.function(f, jit_compile=True),
}


def run_mask(
    config: loss_scale.LossScaleConfig,
    mask: Iterable,
    wrap: Callable = RUNNERS["eager"],
) -> list[loss_scale.LossScaleState]:
    """Runs `next_state` over a mask; returns the state after each step, in NumPy.

    Args:
      config: A `LossScaleConfig`.
      mask: Whether the gradients of each step are finite: bools, or "+" and "-".
      wrap: Compiles the step, for example `tf.function`.
    """
    step = wrap(lambda state, finite: loss_scale.next_state(config, state, finite))
    state = as_tensors(config.initial_state())
    states = []
    for finite in mask:
        state = step(state, tf.constant(finite in (True, "+")))
        states.append(loss_scale.LossScaleState(*(field.numpy() for field in state)))
    return states


def _schedule():
    return keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)


OPT = keras.optimizers
# beta_2 0.9, not 0.999: 1 - beta_2 ** step would magnify rounding a thousandfold.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: OPT.SGD(0.1),
    "momentum": lambda: OPT.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: OPT.Adam(0.1, beta_2=0.9),
    "AdamW": lambda: OPT.AdamW(0.1, beta_2=0.9, weight_decay=0.1),
    "RMSprop": lambda: OPT.RMSprop(0.1, momentum=0.5),
    "centered": lambda: OPT.RMSprop(0.1, momentum=0.9, centered=True),
    "Adagrad": lambda: OPT.Adagrad(0.1),
    "Adadelta": lambda: OPT.Adadelta(0.1),
    "Adafactor": lambda: OPT.Adafactor(0.1),
    "Adamax": lambda: OPT.Adamax(0.1),
    "Nadam": lambda: OPT.Nadam(0.1),
    "Ftrl": lambda: OPT.Ftrl(0.1),
    "Lion": lambda: OPT.Lion(0.1),
    "Lamb": lambda: OPT.Lamb(0.1),
    "Muon": lambda: OPT.Muon(0.1),
    "ScheduleFreeAdamW": lambda: OPT.ScheduleFreeAdamW(0.1),
    "amsgrad": lambda: OPT.Adam(0.1, amsgrad=True),
    "schedule": lambda: OPT.SGD(_schedule(), momentum=0.5),
    "decay": lambda: OPT.SGD(0.1, weight_decay=0.1),
    "clipping": lambda: OPT.SGD(0.1, momentum=0.5, clipnorm=0.5),
    "global clipping": lambda: OPT.SGD(0.1, momentum=0.5, global_clipnorm=0.5),
    "averages": lambda: OPT.SGD(0.1, use_ema=True, ema_momentum=0.5),
    "averages that overwrite": lambda: OPT.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
    ),
    "accumulation": lambda: OPT.Adam(0.1, beta_2=0.9, gradient_accumulation_steps=3),
    "several": lambda: OPT.MultiOptimizer(
        OPT.OptimizerMap(
            OPT.Adam(0.1, beta_2=0.9),
            {".*(second|bias).*": OPT.SGD(0.1, clipvalue=1.0)},
        )
    ),
}


class LossScaleModel:
    """The rule as documented, in Python's integers and NumPy's float32."""

    def __init__(
        self,
        initial_scale=2.0**15,
        growth_interval=2000,
        growth_factor=2.0,
        backoff_factor=0.5,
        hysteresis=1,
        min_scale=2.0**-14,
        max_scale=None,
        dynamic=True,
    ):
        self.rule, self.dynamic, self.hysteresis = growth_interval, dynamic, hysteresis
        self.factors = np.float32(growth_factor), np.float32(backoff_factor)
        self.low = np.float32(min_scale)
        self.high = np.float32(max_scale or max(2.0**24, initial_scale))
        self.scale = np.float32(initial_scale)
        self.tracker = self.skipped = self.in_a_row = 0
        self.left = hysteresis
        self.interval = {
            tfamp.ConstantGrowthInterval: lambda rule: rule.interval,
            tfamp.PiecewiseGrowthInterval: lambda rule: rule.intervals[0],
            tfamp.GeometricGrowthInterval: lambda rule: rule.initial,
        }.get(type(growth_interval), int)(growth_interval)

    def step(self, finite):
        """Takes one step; returns the fields of a `LossScaleState` after it."""
        if finite:
            self.in_a_row = 0
        else:
            self.skipped += 1
            self.in_a_row += 1
        if self.dynamic:
            self._move(finite)
        return (
            self.scale,
            self.tracker,
            self.left,
            self.interval,
            self.skipped,
            self.in_a_row,
        )

    def _move(self, finite):
        self.tracker = self.tracker + 1 if finite else 0
        self.left = self.left if finite else max(self.left - 1, 0)
        grew = finite and self.tracker == self.interval
        backed_off = not finite and self.left == 0
        if grew:
            self.tracker, self.left = 0, self.hysteresis
        with np.errstate(all="ignore"):
            if grew:
                self.scale = min(self.scale * self.factors[0], self.high)
            if backed_off:
                self.scale = max(self.scale * self.factors[1], self.low)
        self.interval = self.next_interval(grew, backed_off)

    def next_interval(self, grew, backed_off):
        """Returns the growth interval by the rule of the schedule."""
        rule = self.rule
        if isinstance(rule, tfamp.PiecewiseGrowthInterval):
            return rule.intervals[sum(self.skipped >= b for b in rule.boundaries)]
        if not isinstance(rule, tfamp.GeometricGrowthInterval):
            return self.interval
        wanted = min(max(self.interval, rule.min_interval), rule.max_interval)
        if grew:
            wanted = math.floor(wanted * rule.shorten)
        if backed_off:
            wanted = math.ceil(wanted * rule.lengthen)
        return min(max(wanted, rule.min_interval), rule.max_interval)


# ---- Scripts ----


def load_module(path: pathlib.Path) -> Any:
    """Returns the module of a file, wherever it is."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_scripts(
    cases: Iterable[tuple[str, list[str], str | os.PathLike]],
) -> list[workers.Finished]:
    """Runs scripts one after another.

    Args:
      cases: (path of the script, arguments, working directory) of each.
    """
    return [workers.run_script(*case) for case in cases]


# ---- Configurations ----


def with_fields(config, **fields):
    """Returns a configuration in which fields are set; `__` stands for a dot."""
    given = {name.replace("__", "."): value for name, value in fields.items()}
    config.update_from_flattened_dict(given)
    return config


def configured(recipe, *args, **fields):
    """Returns a recipe's configuration with fields, as `with_fields`."""
    return with_fields(recipe.get_config(*args), **fields)


ROOT = workers.TESTS.parent


@contextlib.contextmanager
def one_line(error, words):
    """Expects an error whose text matches and is one line."""
    with pytest.raises(error, match=words) as caught:
        yield caught
    assert "\n" not in str(caught.value)
