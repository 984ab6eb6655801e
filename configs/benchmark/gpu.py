"""What a GPU is for: BERT-Base, a ResNet and a wide CNN, in every mode, with XLA too.

    python scripts/benchmark.py --config=configs/benchmark/gpu.py

On random batches, with new weights: needs no data. BERT-Base has SQuAD's length of 384.
Time to accuracy is that of `quick.py`, whose network is small for a GPU; for a run
worth its while set another configuration there.

Expected: not measured, no GPU was at hand; some 130 processes, so an hour or more.
Resumable; `--tasks=bert_base` is a third of it.
"""

from tfamp.benchmark import cells, workloads


def get_config():
    """Returns the configuration."""
    config = workloads.load("quick.py", __file__)
    config.name = "gpu"
    config.repeats = 3  # The least that tells noise.
    config.steps, config.warmup = 30, 10
    config.tasks = {
        "bert_base": synthetic("../bert/squad.py", 32),
        "mnist_wide": synthetic("../cnn/mnist_wide.py", 512),
        "resnet": synthetic("../cnn/cifar10_resnet.py", 512),
    }
    return config


def synthetic(path, batch_size):
    """A task in every mode, with and without XLA."""
    config = workloads.load(path, __file__)
    if "preset" in config.model:
        config.model.preset = ""
    # The same for all; the cells say what they have.
    config.float32.batch_size = None
    task = cells.get_task(config)
    task.slow_modes = True
    task.batch_sizes = (batch_size,)
    task.xla = ("float32", "tf32", "mixed_bfloat16", "mixed_float16")
    return task
