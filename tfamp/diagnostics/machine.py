"""Describes a machine: what each number format is on it, and what is switched how."""

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfamp import errors, hardware, kernel_switches
from tfamp.diagnostics import devices
from tfamp.graph_rewrite import switch as graph_rewrite
from tfamp.precision import policy

SCHEMA_VERSION = 1
_PACKAGES = ("tfamp", "tensorflow", "keras", "numpy")
# Instruction sets that decide which matrix kernels oneDNN has.
_CPU_FLAGS = (
    *("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_fp16", "avx_ne_convert"),
)
# Variables that decide what runs, beside those of `kernel_switches`.
_VARIABLES = (
    "TF_ENABLE_AUTO_MIXED_PRECISION",
    "TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRITE",
    "TF_ENABLE_AUTO_MIXED_PRECISION_LOSS_SCALING",
    "TF_ENABLE_ONEDNN_OPTS",
    "ONEDNN_MAX_CPU_ISA",
    "NVIDIA_TF32_OVERRIDE",
    "XLA_FLAGS",
    "TF_XLA_FLAGS",
    "CUDA_VISIBLE_DEVICES",
    "KERAS_BACKEND",
)
_REWRITE_PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"


class MachineReport(NamedTuple):
    """What a machine is, and what `enable` would do there.

    Attributes:
      simulated: Whether it is a device of the table and not this host.
      device: The training devices' name.
      formats: Rows of (device, format, "fast", "slow" or "no", reason).
      mode: The mode that `enable()` would choose.
      mode_reason: Why.
      graph_rewrite: The format that graphs could be rewritten to, or "no".
      graph_rewrite_reason: Why.
      facts: (name, value) pairs: versions, CPU flags, oneDNN, TF32.
      variables: Environment variables that are set and matter.
      switches: Kernel switches as dicts; empty where simulated.
    """

    simulated: bool
    device: str
    formats: tuple[tuple[str, str, str, str], ...]
    mode: str
    mode_reason: str
    graph_rewrite: str
    graph_rewrite_reason: str
    facts: tuple[tuple[str, str], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    switches: tuple[dict[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        rows = [
            dict(zip(("device", "format", "speed", "reason"), row, strict=True))
            for row in self.formats
        ]
        return {
            "schema_version": SCHEMA_VERSION,
            **self._asdict(),
            "formats": rows,
            "facts": dict(self.facts),
            "variables": dict(self.variables),
            "switches": list(self.switches),
        }


def describe(
    device: devices.Device = None, environ: Mapping[str, str] | None = None
) -> MachineReport:
    """Describes this host, or a device of the table, without starting TensorFlow.

    Args:
      device: As for `devices.subject`; None for this host with all its devices.
      environ: Environment variables; default: this process'.

    Returns:
      A `MachineReport`.

    Raises:
      ValueError: If the device is not in the table.
    """
    about = devices.subject(device)
    found = hardware.read_devices() if device is None else [about.device]
    decision = hardware.choose_mode(found)
    environ = os.environ if environ is None else environ
    rewrite, why = _rewrite(found, {} if about.simulated else environ)
    simulated = about.simulated
    return MachineReport(
        simulated=simulated,
        device=hardware.device_label(found),
        formats=tuple(row for each in found for row in _format_rows(each)),
        mode=decision.mode,
        mode_reason=decision.reason,
        graph_rewrite=rewrite,
        graph_rewrite_reason=why,
        facts=() if simulated else tuple(_facts(found)),
        variables=() if simulated else tuple(_set_variables(environ)),
        switches=() if simulated else tuple(_switches()),
    )


def _format_rows(device):
    for name, support in hardware.describe_support(device).items():
        speed = "fast" if support.fast else "slow" if support.supported else "no"
        if name == "float32":
            speed = "yes"
        yield (device.label, name, speed, support.reason)


def _rewrite(found, environ):
    try:
        return graph_rewrite.choose_dtype("auto", found, environ)
    except (errors.UnsupportedModeError, ValueError) as error:
        return "no", str(error)


def _facts(found):
    yield "Python", f"{platform.python_version()}, {platform.system()}"
    for package in _PACKAGES:
        yield package, importlib.metadata.version(package)
    yield "CPU cores", str(os.cpu_count())
    cpu = next((device for device in found if device.kind == "CPU"), None)
    if cpu is not None:
        flags = [flag for flag in _CPU_FLAGS if flag in cpu.cpu_flags]
        missing = [flag for flag in _CPU_FLAGS if flag not in cpu.cpu_flags]
        yield "CPU has", ", ".join(flags) or "none of the flags below"
        yield "CPU lacks", ", ".join(missing) or "nothing that matters"
        yield "oneDNN", "on" if cpu.onednn else "off"
    state = policy.read()
    yield "TF32 flag", "on" if state.tensor_float_32 else "off"
    yield "dtype policy", str(state.dtype_policy.name)
    yield "graph rewrite", graph_rewrite.requested_dtype() or "not asked for"


def _set_variables(environ):
    for name in sorted(environ):
        if name in _VARIABLES or name.startswith(_REWRITE_PREFIX):
            yield name, environ[name]


def _switches():
    return [switch._asdict() for switch in kernel_switches.describe()]
