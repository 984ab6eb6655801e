"""Loss scaling: the rule, the optimizer around any other, its state on disk."""
