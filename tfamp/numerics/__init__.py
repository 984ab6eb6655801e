"""What 16 bits lose, layer by layer: comparison, search, and a monitor of training."""
