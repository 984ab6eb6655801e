"""MNIST with a wide network, whose batches are as large as a GPU's memory allows.

    python scripts/train_cnn.py --config=configs/cnn/mnist_wide.py
    python scripts/train_cnn.py --config=configs/cnn/mnist_wide.py --job=train_benchmark

After a published walk-through of mixed precision (seen quoted, without its address):
3x3 convolutions of 420 and 1000 channels, each pooled, one dense layer, Adam at 1e-3, 3
epochs; batches of 590 in float32 and of 1000 in mixed precision, each the largest that
fitted there. `config.float32` has what the float32 runs have of their own; both jobs
above use it. Data as for `mnist.py`, which is for laptops.

Meant for a GPU, and not trained to the end yet. On 2 cores of an AMD EPYC with native
bfloat16, with twice as much other work on them, a step took 23 s in float32 (26 images
a second, peak memory 3.4 GiB) and 25 s in mixed_bfloat16 (40 images a second, 3.6 GiB
for batches 1.7 times as large).
"""

from tfamp.recipes import images


def get_config():
    """Returns the configuration."""
    config = images.get_config()
    config.name = "mnist_wide"
    config.epochs = 3
    config.batch_size = 1000
    config.float32.batch_size = 590
    config.optimizer.schedule = "constant"
    config.data.name = "mnist"
    config.model.blocks = ((420,), (1000,))
    config.model.dense = 0  # The logits are the one dense layer.
    config.model.dropout = 0.0
    config.tiny.model.dense = 0
    return config
