"""Nuclei in microscopy images: the 2018 Data Science Bowl, by a U-Net.

    python scripts/train_unet.py --config=configs/unet/dsb2018.py --data_dir=FOLDER

FOLDER has `images/NAME.png` and `masks/NAME.png`: 256x256 pixels, and one mask for each
image, in which the nuclei of the published set are merged (Caicedo et al., "Nucleus
segmentation across imaging experiments: the 2018 Data Science Bowl", 2019,
https://doi.org/10.1038/s41592-019-0612-7). A fifth of them is the test split.

Expected, of 334 images of the fluorescence kind, 67 of them in the test split: Dice
0.880 in float32 and 0.878 in mixed_bfloat16, IoU 0.785 and 0.783. Crops of 128x128
train; whole images are scored. Time: 11 minutes for both with much other work beside
it, on 2 cores of an AMD EPYC with native bfloat16.
"""

from tfamp.recipes import segmentation


def get_config():
    """Returns the configuration."""
    config = segmentation.get_config()
    config.name = "dsb2018"
    config.epochs = 12
    config.batch_size = 8
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_fraction = 0.05
    config.data.name = "folder"
    config.data.crop_size = 128
    config.tiny.data = {"image_size": 32, "crop_size": 16}
    return config
