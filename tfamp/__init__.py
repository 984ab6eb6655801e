"""tfamp: mixed precision for TensorFlow and Keras 3, chosen, verified, explained."""

import importlib
from typing import Any

from tfamp import quiet

if quiet.is_command():  # In a user's program TensorFlow writes what it likes.
    quiet.import_tensorflow()

# ruff: noqa: E402
from tfamp.facts import versions

versions.check()  # Before what a release that is too old has no names for.

import tfamp.schedules  # noqa: F401  Registers what models of the scripts name.
from tfamp.diagnostics.audit import AuditReport, audit
from tfamp.errors import (
    DataError,
    ExportError,
    LossScaleExhaustedError,
    RunError,
    TfampError,
    UnsupportedModeError,
)
from tfamp.facts.formats import float_format, represent
from tfamp.facts.hardware import detect_support
from tfamp.graph_rewrite.observe import graph_rewrite_report
from tfamp.graph_rewrite.switch import sync_thread
from tfamp.loss_scaling.growth_schedules import (
    ConstantGrowthInterval,
    GeometricGrowthInterval,
    GrowthIntervalSchedule,
    PiecewiseGrowthInterval,
)
from tfamp.loss_scaling.load_model import load_model
from tfamp.loss_scaling.monitor import LossScaleMonitor
from tfamp.loss_scaling.optimizer import LossScaleOptimizer, wrap_optimizer
from tfamp.numerics.compare import compare_precision
from tfamp.numerics.monitor import NumericsMonitor
from tfamp.numerics.results import PrecisionComparison, PrecisionSearch
from tfamp.numerics.search import search_precision
from tfamp.precision.control import (
    disable,
    disable_graph_rewrite,
    enable,
    enable_graph_rewrite,
    enabled,
    graph_rewrite_scope,
    status,
)
from tfamp.precision.conversion import (
    ConversionError,
    precision_scope,
    set_precision,
    set_remat,
)
from tfamp.precision.described import LayerPrecision, describe_layers
from tfamp.precision.overrides import OverrideError
from tfamp.precision.policy import policy_scope
from tfamp.resume.backup import BackupAndRestore
from tfamp.serving.export import export, export_float32
from tfamp.storage.account import MemoryReport, memory
from tfamp.storage.low_bit import low_bit

__version__ = "0.2.0"

__all__ = [
    "AuditReport",
    "BackupAndRestore",
    "ConstantGrowthInterval",
    "ConversionError",
    "DataError",
    "ExportError",
    "GeometricGrowthInterval",
    "GrowthIntervalSchedule",
    "LayerPrecision",
    "LossScaleExhaustedError",
    "LossScaleMonitor",
    "LossScaleOptimizer",
    "MemoryReport",
    "NumericsMonitor",
    "OverrideError",
    "PiecewiseGrowthInterval",
    "PrecisionComparison",
    "PrecisionSearch",
    "RunError",
    "TfampError",
    "UnsupportedModeError",
    "audit",
    "benchmark_model",
    "compare_precision",
    "describe_layers",
    "detect_support",
    "disable",
    "disable_graph_rewrite",
    "enable",
    "enable_graph_rewrite",
    "enabled",
    "export",
    "export_float32",
    "find_batch_size",
    "fit_memory",
    "float_format",
    "graph_rewrite_report",
    "graph_rewrite_scope",
    "load_model",
    "low_bit",
    "memory",
    "policy_scope",
    "precision_scope",
    "rehearse",
    "represent",
    "search_precision",
    "set_precision",
    "set_remat",
    "status",
    "sync_thread",
    "wrap_optimizer",
]


_ABOVE = {
    "benchmark_model": "tfamp.measuring.runner",
    "find_batch_size": "tfamp.measuring.batch_size",
    "fit_memory": "tfamp.measuring.memory_plans",
    "rehearse": "tfamp.measuring.rehearsal",
}


def __getattr__(name: str) -> Any:
    """Imports names of higher layers on first use."""
    if module := _ABOVE.get(name):
        return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
