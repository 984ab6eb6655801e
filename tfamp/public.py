"""The public names of `tfamp`, which its import brings.

In the process of the `tfamp` command they come when they are needed, so that help and
errors need no TensorFlow.
"""

# ruff: noqa: E402, F401
from tfamp import quiet

if quiet.is_command():  # In a user's program TensorFlow writes what it likes.
    quiet.import_tensorflow()

from tfamp.facts import versions

versions.check()  # Before what a release that is too old has no names for.

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
from tfamp.loss_scaling.wrapping import LossScaleOptimizer, wrap_optimizer
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
from tfamp.storage.low_bit import low_bit
from tfamp.storage.step_memory import MemoryReport, memory
from tfamp.updates import schedules  # Registers what models of the scripts name.
