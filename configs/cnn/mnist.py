"""MNIST through TFDS, with a network small enough for a laptop CPU.

    python scripts/train_cnn.py --config=configs/cnn/mnist.py --job=compare

Without a network add `--manual_dir=FOLDER` with the four original `*-ubyte.gz`
files. Expected: test accuracy of at least 0.99 in every mode.
"""

from tfamp.training import base_config


def get_config():
    """Returns the configuration."""
    config = base_config.get_config()
    config.name = "mnist"
    config.task = "image_classification"
    config.epochs = 4
    config.batch_size = 128
    config.data.name = "mnist"
    config.model.name = "cnn"
    config.model.blocks = ((16,), (32,))
    config.model.batch_norm = False
    config.model.dense = 128
    config.model.dropout = 0.3
    config.optimizer.schedule = "cosine"
    config.tiny.model = {"blocks": ((4,), (8,)), "dense": 16}
    return config
