"""tfamp: mixed precision for TensorFlow and Keras 3, chosen, verified, explained."""
