"""The flags and jobs of `tfamp train`, `benchmark` and `doctor`, and of `scripts/`."""
