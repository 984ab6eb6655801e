"""Pets, their outline and the background, through TFDS, by a U-Net.

    python scripts/train_unet.py --config=configs/unet/oxford_iiit_pet.py --job=compare

The masks' three classes are pet, background and outline (Parkhi et al., "Cats and
dogs", 2012, https://www.robots.ox.ac.uk/~vgg/data/pets/), which TFDS numbers from 1.
Images are squeezed to 128x128. Meant for a GPU. No result is recorded yet: the data
could not be downloaded on the hosts that this was developed on.
"""

from tfamp.recipes import segmentation


def get_config():
    """Returns the configuration."""
    config = segmentation.get_config()
    config.name = "oxford_iiit_pet"
    config.epochs = 30
    config.batch_size = 64
    config.eval_batch_size = 64
    config.optimizer.warmup_fraction = 0.05
    config.data.name = "oxford_iiit_pet"
    config.data.classes = 3
    config.data.first_class = 1
    config.data.image_size = 128
    config.data.cache = True  # Decoded and resized once.
    config.model.widths = (32, 64, 128, 256, 512)
    config.tiny.data = {"image_size": 32}
    return config
