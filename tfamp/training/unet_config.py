"""The defaults of `configs/unet/`."""

from ml_collections import config_dict

from tfamp.training import base_config


def get_unet_config() -> config_dict.ConfigDict:
    """Returns the defaults; see `unet.build_network` and `segmentation_data.load`."""
    config = base_config.get_config()
    config.task = "segmentation"
    config.batch_size = 16
    config.eval_batch_size = 16  # Whole images: their activations take memory.
    config.optimizer.schedule = "cosine"
    config.data.name = "folder"
    # With the background: 2 have a sigmoid, more have a softmax.
    config.data.classes = 2
    # Side that images and masks are resized to; None: as they are, all of one size.
    config.data.image_size = config_dict.placeholder(int)
    # Side of the random part of an image that trains; None: the whole image.
    config.data.crop_size = config_dict.placeholder(int)
    config.data.augment = "flips"  # Or "none".
    # A folder's images are in memory already; this is for what is decoded from TFDS.
    config.data.cache = False
    config.data.test_fraction = 0.2  # Of a folder without splits of its own.
    config.data.mask_feature = "segmentation_mask"  # Of a TFDS data set.
    config.data.first_class = 0  # The number in such a mask that is class 0.
    config.model.name = "unet"
    config.model.widths = (16, 32, 64, 128)
    config.model.batch_norm = True
    config.model.dropout = 0.0
    config.tiny.eval_batch_size = 8
    config.tiny.model = {"widths": (4, 8)}
    return config
