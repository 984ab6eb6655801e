"""Describes a machine: what each number format is on it, and what is switched how."""

import os
import platform
from typing import Any, NamedTuple

from tfamp import errors, tables
from tfamp.facts import builds, hardware, versions, xla_flags
from tfamp.facts import switches as kernel_switches
from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.precision import policy

# Instruction sets that decide which matrix kernels oneDNN has.
_CPU_FLAGS = (
    *("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_fp16", "avx_ne_convert"),
)
# Variables that decide what runs, beside those of `kernel_switches`; prefixes.
_VARIABLES = (
    *("TF_ENABLE_ONEDNN_OPTS", "ONEDNN_MAX_CPU_ISA", "NVIDIA_TF32_OVERRIDE"),
    *("XLA_FLAGS", "TF_XLA_FLAGS", "CUDA_VISIBLE_DEVICES", "KERAS_BACKEND"),
    *("TF_ENABLE_AUTO_MIXED_PRECISION", "TF_AUTO_MIXED_PRECISION"),
)


class MachineReport(NamedTuple):
    """What a machine is, and what `enable` would do there; `print` it.

    Attributes:
      simulated: Whether it is a device of the table and not this host.
      device: The training devices' name.
      formats: Dicts of device, format, support ("native": the device
        has units for it; "yes": it runs; "no") and reason.
      choices: Dicts of what `enable` chooses, the choice and the reason.
      facts: Versions, CPU flags, TF32, environment variables that are set and matter:
        name -> value; empty where simulated.
      switches: Kernel switches as dicts; empty where simulated.
    """

    simulated: bool
    device: str
    formats: tuple[dict[str, str], ...]
    choices: tuple[dict[str, str], ...]
    facts: dict[str, str]
    switches: tuple[dict[str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return {"schema_version": 3, **self._asdict()}

    def to_markdown(self) -> str:
        """Returns the report as Markdown tables that can be read as they are."""
        title = "Simulated device" if self.simulated else "This machine trains on"
        facts = [{"fact": name, "value": text} for name, text in self.facts.items()]
        sections = filter(None, (self.formats, self.choices, facts, self.switches))
        parts = [f"# {title}: {self.device}", *map(tables.of_dicts, sections)]
        return "\n\n".join(parts) + "\n"

    __str__ = to_markdown


def describe(device: str | hardware.DeviceDescription | None = None) -> MachineReport:
    """Describes this host, or another device, without starting TensorFlow.

    Args:
      device: As for `audit`; None for this host with all its devices.

    Returns:
      A `MachineReport`.

    Raises:
      ValueError: If the device is not known.
    """
    simulated = device is not None
    devices = [hardware.find_device(device)] if simulated else hardware.read_devices()
    decision = hardware.choose_mode(devices)
    try:
        rewrite = graph_rewrite.choose_dtype(
            "auto", devices, {} if simulated else os.environ
        )
    except (errors.UnsupportedModeError, ValueError) as error:
        rewrite = "no", str(error)
    choices = ("mode", decision.mode, decision.reason), ("graph rewrite", *rewrite)
    columns = ("tfamp.enable()", "would choose", "reason")
    switches = [] if simulated else kernel_switches.describe()
    return MachineReport(
        simulated=simulated,
        device=hardware.device_label(devices),
        formats=tuple(
            {
                "device": each.label,
                "format": x.format,
                "support": _support(x),
                "reason": x.reason,
            }
            for each in devices
            for x in hardware.describe_support(each).values()
        ),
        choices=tuple(dict(zip(columns, row, strict=True)) for row in choices),
        facts={} if simulated else _facts(devices),
        switches=tuple(switch._asdict() for switch in switches),
    )


def _support(support):
    return "native" if support.fast else "yes" if support.supported else "no"


def _facts(devices):
    packages = ("tfamp", "tensorflow", "keras", "numpy")
    facts = {"Python": f"{platform.python_version()}, {platform.system()}"}
    facts |= {name: str(versions.installed(name)) for name in packages}
    facts["CPU cores"] = str(os.cpu_count())
    for cpu in (device for device in devices if device.kind == "CPU"):
        has = ", ".join(flag for flag in _CPU_FLAGS if flag in cpu.cpu_flags)
        facts["CPU has"] = has or "no instruction set for 16 bits"
        facts["oneDNN"] = "on" if cpu.onednn else "off"
    # What assembles XLA's kernels, by the newest NVIDIA GPU.
    capabilities = filter(None, (device.compute_capability for device in devices))
    newest = max(capabilities, default=None)
    state, environ = policy.read(), {**os.environ, **xla_flags.users()}
    return {
        **facts,
        "TensorFlow was built for": str(builds.read_build()),
        **builds.describe_driver(),
        **({"ptxas": builds.describe_ptxas(newest)} if newest else {}),
        "TF32 flag": "on" if state.tensor_float_32 else "off",
        "dtype policy": str(state.dtype_policy.name),
        "graph rewrite": graph_rewrite.requested_dtype() or "not requested",
        **{name: x for name, x in environ.items() if name.startswith(_VARIABLES) and x},
    }
