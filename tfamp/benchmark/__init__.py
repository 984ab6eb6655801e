"""The benchmark: every precision mode beside float32, in one run, with a report."""
