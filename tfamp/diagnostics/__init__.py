"""The audit of a model and the doctor of a machine: why training is not faster."""
