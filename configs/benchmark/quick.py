"""A CNN and a small BERT in every mode, and a run up to an accuracy.

    python scripts/benchmark.py

Expected on 2 cores of an AMD EPYC with native bfloat16: 7 minutes with PyTorch, less
without. A slower one (283 GFLOP/s in float32 instead of 454) took 1.6 times as long for
an earlier version; there take `--config.repeats=3`.
"""

from tfamp.benchmark import suite_config


def get_config():
    """Returns the configuration."""
    config = suite_config.get_config()
    config.name = "quick"
    config.repeats = 4
    config.steps, config.warmup, config.profile_steps = 15, 5, 3
    config.tasks.digits = digits()
    config.tasks.bert = bert()
    config.time_to_accuracy.digits = until_accurate()
    return config


def small_digits():
    """The CNN of `configs/cnn/digits.py` on smaller images."""
    config = suite_config.load("../cnn/digits.py", __file__)
    config.data.image_size = 16
    return config


def digits():
    """The CNN on its own data, in every mode.

    Without dropout, whose masks differ from format to format: with them the error
    column could not tell differences of 10 % from noise, without them those of 2 %.
    """
    config = small_digits()
    config.batch_size = 64
    config.model.dropout = 0.0
    task = suite_config.get_task(config)
    task.xla = ("float32", "mixed_bfloat16")
    task.xla_frameworks = ("tfamp",)
    return task


def bert():
    """A new encoder of 2 layers of 256 on random tokens of length 128."""
    config = suite_config.load("../bert/docstrings.py", __file__)
    config.batch_size = 16
    config.data.sequence_length = config.model.max_sequence_length = 128
    config.model.num_heads = 4
    config.model.hidden_dim, config.model.intermediate_dim = 256, 1024
    task = suite_config.get_task(config)
    task.synthetic = True
    task.slow_modes = False  # Those are to be seen in the other task.
    return task


def until_accurate():
    """The CNN, slower to learn: 5 to 8 epochs up to the target.

    A larger validation split makes its score finer and the epochs shorter.
    """
    config = small_digits()
    config.epochs = 14
    config.validation_fraction = 0.3
    config.optimizer.learning_rate = 1.5e-4
    accuracy = suite_config.get_accuracy(config)
    accuracy.seeds = 6
    accuracy.target = 0.95
    return accuracy
