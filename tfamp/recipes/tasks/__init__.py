"""What each recipe's `create` and `synthetic` do; they import TensorFlow and Keras."""
