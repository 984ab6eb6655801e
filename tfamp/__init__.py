"""tfamp: mixed precision for TensorFlow and Keras 3, chosen, verified, explained."""

# ruff: noqa: F403, F405
import importlib
from typing import TYPE_CHECKING, Any

from tfamp import quiet

if TYPE_CHECKING or not quiet.is_command():
    from tfamp.public import *

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
    "benchmark_model": "tfamp.measuring.benchmark.runner",
    "find_batch_size": "tfamp.measuring.batch_size",
    "fit_memory": "tfamp.measuring.memory_plans",
    "rehearse": "tfamp.measuring.rehearsal",
}


def __getattr__(name: str) -> Any:
    """Imports names of higher layers on first use, and all names in the command."""
    if name in ("benchmark", "training"):
        return importlib.import_module(f"tfamp.{name}")
    if name in __all__:
        module = importlib.import_module(_ABOVE.get(name, "tfamp.public"))
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
