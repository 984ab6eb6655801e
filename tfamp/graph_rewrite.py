"""Grappler's automatic mixed precision: whether it is asked for."""

import tensorflow as tf


def float16_requested() -> bool:
    """Whether TensorFlow is asked to rewrite graphs to float16.

    Such a rewrite needs loss scaling as a float16 layer does, and no layer shows it.
    """
    options = tf.config.optimizer.get_experimental_options()
    return bool(options.get("auto_mixed_precision", False))
