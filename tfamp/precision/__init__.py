"""Which precision a model computes in: the mode, its layers, `compile`."""
