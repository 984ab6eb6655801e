"""MNIST through TFDS, with a network small enough for a laptop CPU.

    python scripts/train_cnn.py --config=configs/cnn/mnist.py --job=compare

Without a network add `--manual_dir=FOLDER` with the four original `*-ubyte.gz`
files. Expected: test accuracy 0.992 in float32, 0.991 in mixed_bfloat16 and in
mixed_float16. Time: two minutes for float32 and mixed_bfloat16, five with mixed_float16
(slow on CPUs), on 2 cores of an AMD EPYC with native bfloat16.
"""

from tfamp.recipes import images


def get_config():
    """Returns the configuration."""
    config = images.get_config()
    config.name = "mnist"
    config.epochs = 6
    config.batch_size = 128
    config.data.name = "mnist"
    config.model.blocks = ((16,), (32,), (64,))
    return config
