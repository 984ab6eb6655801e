"""The update of an optimizer: compiled, and gated where the loss is scaled."""
