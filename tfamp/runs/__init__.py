"""A run trains one task in one precision, and a comparison is the same run in several.

`trainer` is the inner loop, Keras' `fit` with what a run writes and resumes from;
`compare` is the outer one, over modes and seeds. What measures them is above, in
`measuring`: a trial is one figure of one workload, of a process of its own.
"""
