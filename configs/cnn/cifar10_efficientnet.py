"""CIFAR-10 through TFDS, with EfficientNet-B0 from scratch.

    python scripts/train_cnn.py --config=configs/cnn/cifar10_efficientnet.py

On a CPU with `--config.epochs=1 --config.limit_examples=640`.

After a published experiment on an A100 (seen quoted, without its address): PyTorch, an
EfficientNet of unstated size, 50 epochs, 51 % accuracy in all three formats; 811 s in
float32, whose convolutions were in TF32, as is PyTorch's default; 754 s in bfloat16 and
486 s in float16. So the ratios, 1.08 and 1.67, are over TF32 rather than float32, and
of another framework.

The number of epochs is the experiment's. The rest is ours, since it was not stated:
Adam with warm-up and cosine decay, crops and flips, label smoothing, all 50,000 images.
The network is `keras.applications.EfficientNetB0`, which is made for images of 224
pixels: of 32 it leaves a single one after its last stage. `cifar10_resnet.py` is the
better network.

Meant for a GPU; not measured at full length, since the data could not be downloaded on
the hosts that this was developed on. With the flags for a CPU, on an image folder, both
modes and the export took 3 minutes and 26 seconds on 2 cores of an AMD EPYC with native
bfloat16, with several times as much other work on them; mixed_bfloat16 made 0.45 of
float32's steps a second there. Five steps show that it trains, not how well.
"""

from tfamp.recipes import images


def get_config():
    """Returns the configuration."""
    config = images.get_config()
    config.model.name = "efficientnet"
    config.model.dropout = 0.2
    config.name = "cifar10_efficientnet"
    config.epochs = 50
    config.batch_size = 128
    config.validation_fraction = 0.0
    config.label_smoothing = 0.1
    config.optimizer.warmup_fraction = 0.05
    config.data.name = "cifar10"
    config.data.augment = "crop_flip"
    return config
