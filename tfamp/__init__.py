"""tfamp: mixed precision for TensorFlow and Keras 3, chosen, verified, explained."""

from tfamp.checkpoint import load_model
from tfamp.control import disable, enable, status
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
from tfamp.formats import float_format
from tfamp.growth_interval import (
    ConstantGrowthInterval,
    GeometricGrowthInterval,
    GrowthIntervalSchedule,
    PiecewiseGrowthInterval,
)
from tfamp.hardware import detect_support
from tfamp.optimizer import LossScaleOptimizer, wrap_optimizer
from tfamp.policy import policy_scope

__version__ = "0.1.0"

__all__ = [
    "ConstantGrowthInterval",
    "DataError",
    "ExportError",
    "GeometricGrowthInterval",
    "GrowthIntervalSchedule",
    "LossScaleExhaustedError",
    "LossScaleMonitor",
    "LossScaleOptimizer",
    "PiecewiseGrowthInterval",
    "RunError",
    "TfampError",
    "UnsupportedModeError",
    "detect_support",
    "disable",
    "enable",
    "export_float32",
    "float_format",
    "load_model",
    "policy_scope",
    "status",
    "wrap_optimizer",
]
