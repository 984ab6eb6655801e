"""Every function of Keras and TensorFlow that is replaced, and how."""
