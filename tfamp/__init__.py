"""tfamp: mixed precision for TensorFlow and Keras 3, chosen, verified, explained."""

from tfamp.checkpoint import load_model
from tfamp.control import disable, enable, status
from tfamp.convert import ConversionError, set_precision
from tfamp.diagnostics.audit import audit
from tfamp.diagnostics.audit_report import AuditReport
from tfamp.diagnostics.loss_scale_monitor import LossScaleMonitor
from tfamp.errors import (
    DataError,
    ExportError,
    LossScaleExhaustedError,
    RunError,
    TfampError,
    UnsupportedModeError,
)
from tfamp.export import export_float32
from tfamp.formats import float_format, represent
from tfamp.graph_rewrite import sync_thread
from tfamp.growth_interval import (
    ConstantGrowthInterval,
    GeometricGrowthInterval,
    GrowthIntervalSchedule,
    PiecewiseGrowthInterval,
)
from tfamp.hardware import detect_support
from tfamp.optimizer import LossScaleOptimizer, wrap_optimizer
from tfamp.overrides import OverrideError
from tfamp.policy import policy_scope
from tfamp.rewrite_control import (
    disable_graph_rewrite,
    enable_graph_rewrite,
    graph_rewrite_scope,
)
from tfamp.rewrite_report import graph_rewrite_report

__version__ = "0.1.0"

__all__ = [
    "AuditReport",
    "ConstantGrowthInterval",
    "ConversionError",
    "DataError",
    "ExportError",
    "GeometricGrowthInterval",
    "GrowthIntervalSchedule",
    "LossScaleExhaustedError",
    "LossScaleMonitor",
    "LossScaleOptimizer",
    "OverrideError",
    "PiecewiseGrowthInterval",
    "RunError",
    "TfampError",
    "UnsupportedModeError",
    "audit",
    "detect_support",
    "disable",
    "disable_graph_rewrite",
    "enable",
    "enable_graph_rewrite",
    "export_float32",
    "float_format",
    "graph_rewrite_report",
    "graph_rewrite_scope",
    "load_model",
    "policy_scope",
    "represent",
    "set_precision",
    "status",
    "sync_thread",
    "wrap_optimizer",
]
