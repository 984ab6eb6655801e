"""Segmentation with a U-Net: a float32 head, Dice and IoU, a grid of predictions."""

from typing import TYPE_CHECKING

from ml_collections import config_dict

from tfamp.runs import default_config

if TYPE_CHECKING:
    from tfamp.runs import tasks


def get_config() -> config_dict.ConfigDict:
    """Returns the defaults of `configs/unet/`; see `create` and `build_network`."""
    config = default_config.get_config()
    config.update(
        {
            "task": f"{__name__}:create",
            "batch_size": 16,
            "eval_batch_size": 16,  # Whole images: their activations take memory.
            "optimizer": {"schedule": "cosine"},
            "data": {
                "name": "folder",
                # With the background: 2 have a sigmoid, more have a softmax.
                "classes": 2,
                # Side that images and masks are resized to; None: as they are, all of
                # one size.
                "image_size": config_dict.placeholder(int),
                # Side of the random part of an image that trains; None: all of it.
                "crop_size": config_dict.placeholder(int),
                "augment": "flips",  # Or "none".
                # A folder's images are in memory already; this is for what is decoded
                # from TFDS.
                "cache": False,
                "test_fraction": 0.2,  # Of a folder without splits of its own.
                "mask_feature": "segmentation_mask",  # Of a TFDS data set.
                "first_class": 0,  # The number in such a mask that is class 0.
            },
            "model": {
                "name": "unet",
                "widths": (16, 32, 64, 128),
                "batch_norm": True,
                "dropout": 0.0,
            },
            "tiny": {"eval_batch_size": 8, "model": {"widths": (4, 8)}},
        }
    )
    return config


def create(config: config_dict.ConfigDict) -> "tasks.Task":
    """Loads images and masks, and describes the network.

    The score is the Dice of all test pixels, with IoU and the mean Dice of the images.
    Scoring writes `predictions.png` into the run's folder: images of the test split,
    their masks and what was predicted.

    Args:
      config: `config.data` has what `segmentation_data.load` reads, and
        crop_size: side of the random part of an image that trains; None: all of it;
        augment: "flips" or "none".
        `config.model` has the fields of `build_network`.

    Returns:
      A `tasks.Task`; features are images, uint8 [height, width, 3], labels their masks,
      uint8 [height, width, 1].

    Raises:
      DataError: If the data are missing or malformed.
      ValueError: If a setting is invalid.
    """
    from tfamp.recipes.tasks import segmentation

    return segmentation.create(config)


def synthetic(config: config_dict.ConfigDict) -> "tasks.Synthetic":
    """Returns a model and batches of random pixels and masks, in the training size.

    Args:
      config: `config.data.crop_size` or `image_size`, `config.data.classes`,
        `config.model`, `config.batch_size` and `config.seed`.

    Raises:
      ValueError: If a setting is invalid, or the images' size is not known.
    """
    from tfamp.recipes.tasks import segmentation

    return segmentation.synthetic(config)
