"""What every task with a BERT encoder starts from, and the sizes of published ones."""

from ml_collections import config_dict

from tfamp.runs import default_config

# Of Devlin et al., "BERT", 2019.
_PUBLISHED = {
    "base": {"num_layers": 12, "num_heads": 12, "hidden_dim": 768},
    "large": {"num_layers": 24, "num_heads": 16, "hidden_dim": 1024},
}
# How the user's own files are read.
FILES = {
    "train_file": "train.csv",  # Or a pattern such as "*.txt".
    "test_file": "",  # "": a share of the training file is held out.
    "delimiter": ",",
    "header": True,
    "quoted": True,
}


def get_config() -> config_dict.ConfigDict:
    """Returns the defaults of every task with a BERT encoder.

    The recipe is that of fine-tuning in Devlin et al., "BERT", 2019: AdamW, linear
    warm-up over the first tenth and decay, gradients clipped at norm 1. XLA is left to
    Keras (`jit_compile=None`): on where there is a GPU, off on a CPU, where it would
    compute bfloat16 in float32.
    """
    config = default_config.get_config()
    config.update(
        {
            "optimizer": {
                "name": "adamw",
                "learning_rate": 5e-4,
                "schedule": "linear",
                "warmup_fraction": 0.1,
                "epsilon": 1e-6,
                "weight_decay": 0.01,
                "clip_global_norm": 1.0,
            },
            "data": {
                "split_seed": 0,
                "test_fraction": 0.2,  # Unused where there is test data.
                "sequence_length": 64,
                "on_bad_rows": "raise",  # Or "skip": left out and counted.
            },
            "model": {
                "name": "bert",
                # Pretrained weights; the sizes below are those of a new encoder.
                "preset": "",
                "num_layers": 2,
                "num_heads": 2,
                "hidden_dim": 128,
                "intermediate_dim": 512,
                "dropout": 0.1,
                "max_sequence_length": 64,
                "vocabulary_size": 4096,
            },
            "tiny": {
                "model": {
                    "preset": "",
                    "num_layers": 1,
                    "num_heads": 2,
                    "hidden_dim": 32,
                    "intermediate_dim": 64,
                    "vocabulary_size": 512,
                }
            },
        }
    )
    return config


def use_published(config: config_dict.ConfigDict, size: str) -> None:
    """Sets the uncased English weights of a size, and the sizes of a new encoder to it.

    So that `--config.model.preset=` means the same shapes with new weights.

    Args:
      config: Changed in place.
      size: "base" or "large".
    """
    sizes = _PUBLISHED[size]
    config.model.update(
        {
            "preset": f"bert_{size}_en_uncased",
            **sizes,
            "intermediate_dim": 4 * sizes["hidden_dim"],
            "max_sequence_length": 512,
            "vocabulary_size": 30522,
        }
    )
