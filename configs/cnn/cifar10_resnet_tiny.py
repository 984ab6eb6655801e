"""CIFAR-10, or other small images, with a small ResNet for a laptop CPU.

    python scripts/train_cnn.py --config=configs/cnn/cifar10_resnet_tiny.py

The recipe of `cifar10_resnet.py` with three narrow stages of one block each, 10 epochs
and batches of 64. Any folders of small images by class will do, with `--manual_dir` and
`--config.data.name`. Of 4000 of MNIST's digits as PNG files of
32x32 pixels in color it learned to tell 1000 others with an accuracy of 0.949 in
float32 and 0.946 in mixed_bfloat16, in 6 minutes for both on 2 cores of an AMD EPYC
with native bfloat16, with several times as much other work on them. Not measured on
CIFAR-10, which could not be downloaded on the hosts that this was developed on.
"""

from tfamp.recipes import images


def get_config():
    """Returns the configuration."""
    config = images.get_config()
    config.model.name = "resnet"
    config.name = "cifar10_resnet_tiny"
    config.epochs = 10
    config.batch_size = 64
    config.validation_fraction = 0.0
    config.label_smoothing = 0.1
    config.optimizer.name = "sgd"
    config.optimizer.learning_rate = 0.1
    config.optimizer.nesterov = True
    config.optimizer.weight_decay = 5e-4 / (1 - 0.9)  # L2 / (1 - momentum)
    config.optimizer.warmup_fraction = 0.1
    config.data.name = "cifar10"
    config.data.augment = "crop_flip"
    config.model.widths = (16, 32, 64)
    config.model.blocks_per_stage = (1, 1, 1)
    return config
