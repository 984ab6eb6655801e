"""Kernels in place of slow or wrong ones of Keras and TensorFlow on CPUs."""
