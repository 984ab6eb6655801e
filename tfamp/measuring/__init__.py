"""A trial measures one workload in a fresh process, and its figures are kept in a file.

The benchmark, the search for a batch size, `fit_memory` and `rehearse` each make a list
of trials and read their figures.
"""
