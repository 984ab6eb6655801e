"""A CNN and a small BERT in every mode, and a run up to an accuracy.

    python scripts/benchmark.py

On random batches of the configurations' shapes; the runs up to an accuracy are on the
real digits. Some 10 minutes on 2 cores with PyTorch, less without.
"""

from tfamp.benchmark import cells, workloads


def get_config():
    """Returns the configuration."""
    config = cells.get_config()
    config.name = "quick"
    config.repeats = 4
    config.steps, config.warmup = 15, 5
    config.tasks.digits = digits()
    config.tasks.bert = bert()
    config.time_to_accuracy.digits = until_accurate()
    return config


def small_digits():
    """The CNN of `configs/cnn/digits.py` on smaller images."""
    config = workloads.load("../cnn/digits.py", __file__)
    config.data.image_size = 16
    return config


def digits():
    """The CNN in every mode.

    Without dropout, whose masks differ from format to format: with them the error
    column could not tell differences of 10 % from noise, without them those of 2 %.
    """
    config = small_digits()
    config.batch_size = 64
    config.model.dropout = 0.0
    task = cells.get_task(config)
    task.slow_modes = True
    task.xla = ("float32", "mixed_bfloat16")
    return task


def bert():
    """A new encoder of 2 layers of 256 on random tokens of length 128."""
    config = workloads.load("../bert/docstrings.py", __file__)
    config.batch_size = 16
    config.data.sequence_length = config.model.max_sequence_length = 128
    config.model.num_heads = 4
    config.model.hidden_dim, config.model.intermediate_dim = 256, 1024
    return cells.get_task(config)


def until_accurate():
    """The CNN, slower to learn: 5 to 8 epochs up to the target.

    A larger validation split makes its score finer and the epochs shorter.
    """
    config = small_digits()
    config.epochs = 14
    config.validation_fraction = 0.3
    config.optimizer.learning_rate = 1.5e-4
    accuracy = cells.get_accuracy(config)
    accuracy.seeds = 6
    accuracy.target = 0.95
    return accuracy
