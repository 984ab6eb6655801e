"""How a model is looked into: layers, inputs, traces, calls, quantized layers."""
