"""MNIST through TFDS, with a network small enough for a laptop CPU.

    python scripts/train_cnn.py --config=configs/cnn/mnist.py --job=compare

Without a network add `--manual_dir=FOLDER` with the four original `*-ubyte.gz`
files. Expected: test accuracy of at least 0.99 in every mode.
"""

from tfamp.training import base_config


def get_config():
    """Returns the configuration."""
    config = base_config.get_cnn_config()
    config.name = "mnist"
    config.epochs = 6
    config.batch_size = 128
    config.data.name = "mnist"
    config.model.blocks = ((16,), (32,), (64,))
    return config
