"""A trial measures one workload in a fresh process, and its figures are kept in a file.

The benchmark, the search for a batch size, `fit_memory` and `rehearse` decide which
trials to make, and report their figures.
"""
