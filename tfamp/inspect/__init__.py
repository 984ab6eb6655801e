"""How a model is looked into: its layers, inputs, traces and recorded calls."""
