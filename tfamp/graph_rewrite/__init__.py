"""TensorFlow's graph rewrite to 16 bits: switched on, and seen to work."""
