"""Keras callbacks of a run: what it records, keeps, says, and does in each epoch."""
