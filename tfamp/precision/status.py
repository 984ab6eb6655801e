"""What is requested and what is in force, as text."""

import re
import threading
from typing import NamedTuple

from tfamp import errors, records
from tfamp.facts import (
    graph_context,
    hardware,
    modes,
    versions,
    xla_cache,
    xla_flags,
)
from tfamp.graph_rewrite import first_step, switch
from tfamp.inspect import slow_layers
from tfamp.keras_patches import patches
from tfamp.kernels import bias_gradient, clusters, install, long_attention
from tfamp.operators import again
from tfamp.precision import policy, rules
from tfamp.precision.settings import OFF, Settings
from tfamp.storage import remat
from tfamp.updates import compiled

# What of a status needs attention: rows that match, the first that are shown first.
_ATTENTION = {
    "healed": "(?!none$)",
    "versions": ".*(untested|; off, as|no code)",
    "graph_rewrite": "(?!off$)",
    "xla": ".*(not read|no longer|unless XLA|of another op)",
    "fused_kernels": ".*the last update",
    "formats_meet": "(?!none seen$)",
}
_MOST = 2  # Such rows that are shown.


class Status(NamedTuple):
    """The requested precision and the precision in force; `print` it.

    `print(status)` shows the mode in force, the reason, the device, and what needs
    attention; `print(status.full())` shows all.

    Attributes:
      requested: Mode given to `enable`, "auto" included; None if not enabled.
      effective: Mode in force, or the name of a dtype policy that is no mode's. With
        a graph rewrite: float32 until a training step has shown the rewrite.
      reason: Why this mode, and why it differs from the requested one if it does.
      device: The devices that the decision is about.
      dtype_policy: Name of Keras' global dtype policy.
      overrides: The modes of single layers, or "none".
      remat: Which layers are recomputed in the backward pass, and whether
        `keras.RematScope` works.
      optimizer_state: How compiled models' optimizers store their slots.
      weights: How large weights are stored from the first training step on.
      tensor_float_32: Whether float32 matrix products may use TF32.
      loss_scaling: Whether, and how, `compile` adds loss scaling.
      graph_rewrite: What was requested of Grappler's rewrite, and what was observed.
      bias_gradients: Whether bfloat16 bias gradients are summed in float32.
      embedding_gradients: Whether rows of one index are summed before they are squared.
      fused_kernels: Which operations are fused kernels, and why the last update of an
        optimizer was not.
      attention: Where attention takes linear memory.
      xla: Which flags XLA was given for a GPU, whether they are in force, and where
        what it compiles is kept on disk; else why not.
      float32_layers: Which kinds of layers stay in float32 in a 16-bit mode, and why.
      healed: Which layers overflowed float16 in training and are float32 since then.
      formats_meet: Where in the user's code operators were computed in float32, because
        float32 and 16 bits meet there, or float16 cannot represent a number.
      versions: TensorFlow and Keras, whether the pair was tested, and which features
        are off because they lack private names. It also says whether TensorFlow lacks
        code for a GPU of this host.
    """

    requested: str | None
    effective: str
    reason: str
    device: str
    dtype_policy: str
    overrides: str
    remat: str
    optimizer_state: str
    weights: str
    tensor_float_32: bool
    loss_scaling: str
    graph_rewrite: str
    bias_gradients: str
    embedding_gradients: str
    fused_kernels: str
    attention: str
    xla: str
    float32_layers: str
    healed: str
    formats_meet: str
    versions: str

    def full(self) -> str:
        """Returns all attributes, a line for each."""
        return "\n".join(map(self._line, self._fields))

    def __str__(self):
        names = [
            name
            for name, pattern in _ATTENTION.items()
            if re.match(pattern, getattr(self, name))
        ]
        more = f"{len(names) - _MOST} more, and " * (len(names) > _MOST)
        shown = "effective", "reason", "device", *names[:_MOST]
        lines = map(self._line, shown)
        return "\n".join([*lines, f"{more}all settings: print(tfamp.status().full())"])

    def _line(self, name):
        return f"{name.replace('_', ' ') + ':':<22}{getattr(self, name)}"

    __repr__ = __str__  # What a notebook shows of `enable()` at the end of a cell.


# Sentences that an audit adds to the reason, until the next `enable`.
NOTES: dict[str, None] = {}


def describe(
    settings: Settings,
    rewrite: switch.Rewrite | None,
    thread: threading.Thread | None = None,
) -> Status:
    """Returns the status of the globals as they are now.

    Args:
      settings: Those of `enable`; `OFF` if it is not in force.
      rewrite: The graph rewrite that it enabled, if any.
      thread: The thread that called it, to which Keras' policy belongs.
    """
    devices = hardware.read_devices()
    state, active = policy.read(), switch.active()
    change = _change(settings, state, thread)
    seen = first_step.last_report() if active else None
    effective = _mode_of(state, devices)
    if seen and seen.effective:
        effective = f"mixed_{seen.effective}"
    elif not change and rewrite is None:
        effective = settings.mode.name
    return Status(
        requested=None if settings is OFF else settings.options.mode,
        effective=effective,
        reason=change or "; ".join([settings.reason, *NOTES]),
        device=hardware.device_label(devices),
        dtype_policy=state.dtype_policy.name,
        overrides=_describe_overrides(settings.overrides),
        remat=_describe_remat(settings.remat),
        optimizer_state=settings.options.optimizer_state,
        weights=settings.options.weights,
        tensor_float_32=state.tensor_float_32,
        loss_scaling=_describe_scaling(settings, active),
        graph_rewrite=_describe_rewrite(active, seen),
        bias_gradients=(
            "bfloat16 ones are summed in float32"
            if bias_gradient.HOOKS.in_force()
            else "TensorFlow's: wrong in bfloat16 on a CPU without XLA"
        ),
        embedding_gradients=(
            "repeated rows are summed, then squared"
            if bias_gradient.EMBEDDING_HOOKS.in_force()
            else "Keras': repeated rows are squared, then summed"
        ),
        fused_kernels=_describe_kernels(settings),
        attention=long_attention.describe(),
        xla=_describe_xla(settings.options.xla_flags),
        float32_layers=_describe_float32(settings),
        healed=errors.examples(_describe_healed()) or "none",
        formats_meet=errors.examples(sorted(again.LINES)) or "none seen",
        versions=_describe_versions(devices),
    )


def _mode_of(state, devices):
    """Returns the mode that the globals are, or the policy's name if it is none's."""
    tf32 = state.tensor_float_32 and hardware.format_support("tf32", devices).supported
    name = state.dtype_policy.name
    return "tf32" if name == "float32" and tf32 else name


def _change(settings, state, thread):
    """What differs from what `enable` set; empty if nothing does."""
    if settings is OFF:
        return settings.reason
    here, current = threading.current_thread(), state.dtype_policy.name
    wanted = settings.mode.policy
    if current != wanted and thread is not here:
        return (
            f"Keras' dtype policy belongs to a thread: {wanted} to {thread.name!r}, "
            f"which called enable(), {current} to this one, {here.name!r}. Call "
            "tfamp.enable in the thread that builds models"
        )
    if current != wanted:
        return f"the global dtype policy was changed from {wanted} to {current}"
    changed = state.tensor_float_32 != settings.mode.tensor_float_32
    return "the TF32 flag was changed after enable()" if changed else ""


def _describe_rewrite(active, seen):
    if not active:
        return "off"
    requested = f"{active.dtype} requested ({active.reason})"
    return str(seen or f"{requested}; no training step seen yet")


def _describe_overrides(overrides):
    return (
        ", ".join(f"{each.pattern!r}: {each.mode.name}" for each in overrides) or "none"
    )


def _describe_remat(patterns):
    works = "works" if remat.HOOKS.in_force() else "fails in `fit`, as in Keras"
    requested = ", ".join(map(repr, patterns)) or "none requested"
    return f"{requested}; keras.RematScope {works}"


def _describe_kernels(settings):
    if not settings.fuses_updates:
        return "off"
    if not (device := graph_context.one_device()):
        return "none: for graphs on one CPU or GPU"
    names = [*install.HOOKS.in_force(), "Adam's update"]
    if device == "GPU":
        names = ["small operators of a training step"] * bool(clusters.HOOKS.in_force())
        names += ["optimizers' updates"]
        names += ["images stay channels last"] * switch.CHANNELS_LAST.is_set
    why = compiled.HOOKS.last_reason
    last = f"; the last update ran as Keras has it: {why}" if why else ""
    return f"{', '.join(names)} (in graphs on one {device} without XLA){last}"


def _describe_xla(wanted):
    flags = xla_flags.describe() if wanted else "none (not requested)"
    return f"flags: {flags}; programs on disk: {xla_cache.describe()}"


def _describe_scaling(settings, active):
    scaling, mode = settings.scaling, settings.mode
    if settings is OFF:
        if not active:
            return "as stock Keras does"
        mode = modes.get_mode(f"mixed_{active.dtype}")
    if scaling is False:
        return "off, as requested"
    kind = "dynamic" if scaling.dynamic else "static"
    described = f"{kind} from {scaling.initial_scale:g}"
    if mode.needs_loss_scale:
        return f"{described}, added by compile()"
    return f"not needed by {mode.name}; {described} where a float16 layer trains"


def _describe_float32(settings):
    if not settings.is_mixed:
        return "only those requested"
    *kinds, slow = [each.what for each in rules.BY_KIND]
    listed = ", ".join(["outputs", "what computes with raw inputs", *kinds])
    if not slow_layers.has_slow(settings.mode.compute_format):
        return listed
    each = ", ".join(f"{x.what} ({x.ratio} times)" for x in slow_layers.SLOW)
    return f"{listed}; {slow}: {each}"


def _describe_healed():
    return [
        f"{layer.path or layer.name!r} (up to {record.overflow:g})"
        for layer, record in records.every()
        if record.overflow is not None
    ]


def _describe_versions(devices):
    missing = [f"{what} ({names})" for what, names in patches.missing().items()]
    off = f"; off, as they lack names: {', '.join(missing)}" if missing else ""
    return "; ".join([versions.describe() + off, *hardware.missing_code(devices)])
