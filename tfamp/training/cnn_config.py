"""The configuration that the files in `configs/cnn/` start from."""

from ml_collections import config_dict

from tfamp.training import augmentation, base_config

# Network -> what its model reads, see `cnn.NETWORKS`; and that of a run of seconds.
MODELS = {
    "cnn": {"blocks": ((16,), (32,)), "batch_norm": False, "dense": 128}
    | {"dropout": 0.3},
    "resnet": {"widths": (64, 128, 256, 512), "blocks_per_stage": (2, 2, 2, 2)},
    "efficientnet": {"dropout": 0.2},
}
_TINY = {
    "cnn": {"blocks": ((4,), (8,)), "dense": 16},
    "resnet": {"widths": (8, 16), "blocks_per_stage": (1, 1)},
    "efficientnet": {},
}


def get_cnn_config(network: str = "cnn") -> config_dict.ConfigDict:
    """Returns the defaults of image classification; see `cnn.create`.

    Args:
      network: A key of `MODELS`.
    """
    config = base_config.get_config()
    config.task = "image_classification"
    config.optimizer.schedule = "cosine"
    config.data.augment = augmentation.NONE  # Or "crop_flip".
    # Of images that are timed without being read, where their data set is not known.
    config.data.image_shape = ()  # (height, width, channels).
    config.data.classes = 10
    # Share of the target that is spread evenly over all classes.
    config.label_smoothing = 0.0
    config.model.name = network
    config.model.update(MODELS[network])
    config.tiny.model = _TINY[network]
    return config
