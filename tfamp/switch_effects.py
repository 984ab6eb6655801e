"""What the switches of TensorFlow's kernels ask for, and what holds; pure functions."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfamp import hardware, switch_table


class Switch(NamedTuple):
    """One switch.

    Attributes:
      name: The environment variable, the flag in one, or TensorFlow's switch.
      value: The variable's or flag's text; None if it is not set.
      requested: What that asks for.
      effective: What holds, "unknown" and "no effect" included.
      default: What holds where nothing is set.
      reason: What the switch does, and why the two differ if they do.
      read_by: What reads it, and when.
    """

    name: str
    value: str | None
    requested: str
    effective: str
    default: str
    reason: str
    read_by: str


class Host(NamedTuple):
    """What the effect of the switches depends on.

    Attributes:
      environ: The environment variables.
      devices: As `hardware.read_devices` returns them.
      tensor_float_32: TensorFlow's TF32 flag.
      deterministic: Whether op determinism is on.
      started: Whether TensorFlow's runtime has started, so that kernels may have run.
    """

    environ: Mapping[str, str]
    devices: Sequence[hardware.DeviceDescription]
    tensor_float_32: bool
    deterministic: bool
    started: bool


def evaluate(host: Host) -> list[Switch]:
    """Returns every switch as it stands on a host; a pure function."""
    return [
        _tf32(host),
        _tf32_override(host),
        *_determinism(host),
        *(_variable(host, variable) for variable in switch_table.VARIABLES),
        *(_xla_flag(host, name) for name in switch_table.XLA_FLAGS),
        _onednn(host),
        *(_fpmath(host, name) for name in switch_table.FPMATH),
        *(_unread(host, name) for name in switch_table.UNREAD if name in host.environ),
    ]


def _tf32(host):
    support = hardware.format_support("tf32", host.devices)
    forbidden = host.environ.get(switch_table.TF32_OVERRIDE) == "0"
    reason = (
        f"{switch_table.TF32_OVERRIDE}=0 forbids it" if forbidden else support.reason
    )
    return Switch(
        "TF32",
        None,
        _on(host.tensor_float_32),
        _on(host.tensor_float_32 and support.supported and not forbidden),
        "on",
        "float32 matrix products and convolutions round their inputs to 10 bits; "
        f"{reason}",
        "TensorFlow's kernels, each time; XLA and cuBLASLt when they first compile or "
        "plan, so that what ran before may keep what stood then",
    )


def _tf32_override(host):
    name = switch_table.TF32_OVERRIDE
    value = host.environ.get(name)
    asked = "TF32 off" if value == "0" else "nothing" if value is None else "unknown"
    effective, why = _take_effect(host, "GPU", asked, value is not None)
    reason = "0 forbids TF32 whatever TensorFlow's own flag says" + why
    if asked == "unknown":
        reason = f"{reason}; NVIDIA documents 0 alone"
    by = "cuBLAS and cuDNN, not TensorFlow; once, when they start"
    return Switch(
        switch_table.TF32_OVERRIDE, value, asked, effective, "nothing", reason, by
    )


def _determinism(host):
    state = _on(host.deterministic)
    value = host.environ.get(switch_table.DETERMINISTIC)
    asked, why = _read_bool(value, False)
    if asked != host.deterministic:
        why += "; overridden since, unset, or set after TensorFlow had read it"
    return [
        Switch(
            "op determinism",
            None,
            state,
            state,
            "off",
            "the same numbers in every run, slower; random operations raise unless "
            "keras.utils.set_random_seed was called, as do operations without a "
            "deterministic kernel",
            "TensorFlow's kernels, each time; XLA when it compiles",
        ),
        Switch(
            switch_table.DETERMINISTIC,
            value,
            _on(asked),
            state,
            "off",
            f"turns op determinism on{why}",
            "TensorFlow, once: when it first asks",
        ),
    ]


def _variable(host, variable):
    value = host.environ.get(variable.name)
    asked, why = _read_bool(value, variable.default, variable.reader)
    is_late = value is not None and variable.when == "once"
    effective, reason = _take_effect(host, variable.needs, _on(asked), is_late)
    if effective != "no effect" and host.deterministic:
        if variable.name == switch_table.AUTOTUNE:
            effective = "off"
            reason = "; op determinism takes the first algorithm"
        elif variable.name == "TF_CUDNN_DETERMINISTIC":
            effective, reason = "on", "; op determinism is on"
    when = "once, at the first of the process"
    return Switch(
        variable.name,
        value,
        _on(asked),
        effective,
        _on(variable.default),
        f"{variable.effect}{why}{reason}",
        f"{variable.read_by}; {when if variable.when == 'once' else variable.when}",
    )


def _xla_flag(host, name):
    default, needs, effect = switch_table.XLA_FLAGS[name]
    found = [
        word.partition("=")[2] or "true"
        for word in host.environ.get("XLA_FLAGS", "").split()
        if word.lstrip("-").partition("=")[0] == name
    ]
    value = found[-1] if found else None
    asked = default if value is None else value
    effective, reason = _take_effect(host, needs, asked, value is not None)
    if name == "xla_gpu_exclude_nondeterministic_ops" and effective != "no effect":
        if host.deterministic:
            effective, reason = "true", "; op determinism is on"
    by = "XLA, from XLA_FLAGS; once, when it first compiles"
    return Switch(f"--{name}", value, asked, effective, default, effect + reason, by)


def _take_effect(host, needs, asked, is_late):
    """What holds, and the end of its reason, where a kernel of a device reads it."""
    if needs == "GPU" and not any(d.compute_capability for d in host.devices):
        return "no effect", "; no effect: no NVIDIA GPU"
    if needs == "CPU" and not any(d.kind == "CPU" for d in host.devices):
        return "no effect", "; no effect: no CPU"
    if is_late and host.started:
        return (
            f"{asked} if set in time",
            "; TensorFlow has started: too late if it was changed after the first use",
        )
    return asked, ""


def _onednn(host):
    value = host.environ.get(switch_table.ONEDNN)
    is_on = any(device.onednn for device in host.devices)
    asked, why = _read_bool(value, is_on)
    if asked != is_on:
        why += "; set after TensorFlow's import, or this build has no oneDNN"
    return Switch(
        switch_table.ONEDNN,
        value,
        _on(asked),
        _on(is_on),
        "on where the CPU has AVX512_VNNI, AVX512_BF16, AVX_VNNI or AMX",
        f"oneDNN's CPU kernels, which sum in another order{why}",
        "TensorFlow, once: at its import",
    )


def _fpmath(host, name):
    value = host.environ.get(name)
    by_tensorflow = name.startswith("TF_")  # It compares the text as it stands.
    text = value if by_tensorflow else (value or "").upper()
    known = {"BF16"} if by_tensorflow else {"BF16", "F16", "TF32", "ANY"}
    asked = text if text in known else "STRICT"
    cpus = [device for device in host.devices if device.kind == "CPU"]
    flags = frozenset().union(*(device.cpu_flags for device in cpus))
    reason = "lets oneDNN round the inputs of float32 kernels"
    if asked == "STRICT":
        effective = "STRICT"
    elif not any(device.onednn for device in cpus):
        effective, reason = "no effect", f"{reason}; no effect: oneDNN is off"
    elif not flags & {"amx_bf16", "amx_fp16"}:
        # Measured with AVX512_BF16: oneDNN is told, and every bit stays the same.
        effective, reason = "no effect", f"{reason}; no effect: only AMX kernels do"
    else:
        effective = "unknown"
        reason += "; on AMX convolutions may, by oneDNN's sources; not measured"
    reader = "TensorFlow" if by_tensorflow else "oneDNN"
    return Switch(
        name, value, asked, effective, "STRICT", reason, f"{reader}; once, at first use"
    )


def _unread(host, name):
    reason = "no effect: TensorFlow 2.21 does not read it"
    value = host.environ[name]
    return Switch(name, value, value, "no effect", "", reason, "nothing")


def _read_bool(value, default, reader="bool"):
    """What TensorFlow makes of a variable's text, and a word on what it cannot read."""
    if value is None:
        return default, ""
    if reader != "bool":
        return (value == "1" if reader == "only 1" else value != "0"), ""
    known = {"0": False, "false": False, "1": True, "true": True}
    if value.lower() in known:
        return known[value.lower()], ""
    return default, f"; {value!r} is none of 0, 1, false, true: the default"


def _on(flag):
    return "on" if flag else "off"
