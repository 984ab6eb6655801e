"""What a training step holds: activations that are computed again instead."""
