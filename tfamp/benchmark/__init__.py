"""Benchmarks: every precision mode beside float32, for any model, on this machine."""

from tfamp.benchmark.report import Report
from tfamp.benchmark.runner import benchmark_model

__all__ = ["Report", "benchmark_model"]
