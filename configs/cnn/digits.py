"""Real 8x8 handwritten digits, bundled with scikit-learn: no download.

    python scripts/train_cnn.py

Expected: test accuracy of at least 0.97 in float32 and in the mixed mode. The
network is wider than the task needs, so that the gain of native bfloat16 shows on
a CPU: a demonstration, not a benchmark.
"""

from tfamp.training import base_config


def get_config():
    """Returns the configuration."""
    config = base_config.get_config()
    config.name = "digits"
    config.task = "image_classification"
    config.epochs = 15
    config.batch_size = 32
    config.data.name = "digits"
    config.data.image_size = 32
    config.model.name = "cnn"
    config.model.blocks = ((32,), (128,), (256,))
    config.model.batch_norm = False
    config.model.dense = 256
    config.model.dropout = 0.3
    config.optimizer.schedule = "cosine"
    config.tiny.data = {"image_size": 8}
    config.tiny.model = {"blocks": ((4,), (8,)), "dense": 16}
    return config
