"""CIFAR-10 through TFDS, with a plain convolutional network.

    python scripts/train_cnn.py --config=configs/cnn/cifar10.py --job=compare

Meant for a GPU. No result is recorded yet: the data could not be downloaded on the
hosts that this was developed on.
"""

from tfamp.recipes import images


def get_config():
    """Returns the configuration."""
    config = images.get_config()
    config.name = "cifar10"
    config.epochs = 30
    config.batch_size = 256
    config.optimizer.warmup_fraction = 0.05
    config.data.name = "cifar10"
    config.model.blocks = ((64, 64), (128, 128), (256, 256))
    config.model.batch_norm = True
    config.model.dense = 512
    config.model.dropout = 0.5
    return config
