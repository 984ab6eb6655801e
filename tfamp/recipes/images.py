"""Image classification: a plain network, a ResNet and EfficientNet, by name."""

from typing import TYPE_CHECKING

from ml_collections import config_dict

from tfamp.runs import default_config

if TYPE_CHECKING:
    from tfamp.runs import tasks


def get_config() -> config_dict.ConfigDict:
    """Returns the defaults of `configs/cnn/`; see `create`."""
    config = default_config.get_config()
    config.update(
        {
            "task": f"{__name__}:create",
            "optimizer": {"schedule": "cosine"},
            "data": {
                "augment": "none",  # Or "crop_flip".
                # Of images that are timed without being read, where their data set is
                # not known.
                "image_shape": (),  # (height, width, channels).
                "classes": 10,
            },
            # Share of the target that is spread evenly over all classes.
            "label_smoothing": 0.0,
            "model": {
                # Or "resnet" or "efficientnet"; each reads some of the fields.
                "name": "cnn",
                "blocks": ((16,), (32,)),
                "batch_norm": False,
                "dense": 128,
                "dropout": 0.3,
                "widths": (64, 128, 256, 512),
                "blocks_per_stage": (2, 2, 2, 2),
            },
            "tiny": {
                "model": {
                    **{"blocks": ((4,), (8,)), "dense": 16},
                    **{"widths": (8, 16), "blocks_per_stage": (1, 1)},
                }
            },
        }
    )
    return config


def create(config: config_dict.ConfigDict) -> "tasks.Task":
    """Loads the images and describes the network.

    Args:
      config: What `images_data.load` reads; `config.model` is that of `build_network`,
        `config.data.augment` "none" or "crop_flip", and `config.label_smoothing` counts
        in training.

    Returns:
      A `tasks.Task`.

    Raises:
      DataError: If the data are missing or malformed.
      ValueError: If a setting is invalid.
    """
    from tfamp.recipes.tasks import images

    return images.create(config)


def synthetic(config: config_dict.ConfigDict) -> "tasks.Synthetic":
    """Describes the model and makes batches of random pixels for it.

    Args:
      config: As for `create`; `config.data.image_shape` and `config.data.classes`
        where the data set is not known. `config.seed` alone decides on the content.

    Returns:
      A `tasks.Synthetic`.

    Raises:
      ValueError: If a setting is invalid, or the images' shape is not known.
    """
    from tfamp.recipes.tasks import images

    return images.synthetic(config)
