"""Benchmarks: every precision mode beside float32, for any model, on this machine.

`cells` and `workloads` are what a benchmark's configuration is made with, see
configs/benchmark/quick.py.
"""

from tfamp.measuring import workloads as workloads
from tfamp.measuring.benchmark import cells as cells
from tfamp.measuring.benchmark.report import Report
from tfamp.measuring.benchmark.runner import benchmark_model

__all__ = ["Report", "benchmark_model"]
