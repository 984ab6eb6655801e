"""What a GPU is for: BERT-Base, a ResNet and a wide CNN in every mode, and memory.

    python scripts/benchmark.py --config=configs/benchmark/gpu.py

On random batches, with new weights: needs no data. BERT-Base has SQuAD's length of 384,
and, as the wide CNN, a twin in PyTorch. Memory is the allocator's peak: of blocks that
are computed again, long attention, and slots of 8 bits. Time to accuracy is that of
`quick.py`, whose network is small for a GPU.

It has some 180 processes, which take an hour or more; it can be resumed, and
`--tasks=bert_base` runs one task. `tfamp gpu-report` takes twelve minutes.
"""

from tfamp.benchmark import cells, workloads


def get_config():
    """Returns the configuration."""
    config = workloads.load("quick.py", __file__)
    config.name = "gpu"
    config.repeats = 3  # 3 are the least that tell noise.
    config.steps, config.warmup = 30, 10
    config.tasks = {
        "bert_base": synthetic(bert_base(), 32),
        "resnet": synthetic(workloads.load("../cnn/cifar10_resnet.py", __file__), 512),
        "mnist_wide": synthetic(workloads.load("../cnn/mnist_wide.py", __file__), 512),
        **memory(),
    }
    return config


def bert_base():
    """BERT-Base as a classifier of 384 tokens, with new weights."""
    config = workloads.load("bert.py", __file__).tasks.bert.config
    config.data.sequence_length = config.model.max_sequence_length = 384
    config.model.num_layers = config.model.num_heads = 12
    config.model.hidden_dim, config.model.intermediate_dim = 768, 3072
    return config


def synthetic(config, batch_size):
    """A task in every mode, with and without XLA."""
    # The same for all; the cells say what they have.
    config.float32.batch_size = None
    task = cells.get_task(config)
    task.slow_modes = True
    task.batch_sizes = (batch_size,)
    task.xla = ("float32", "tf32", "mixed_bfloat16", "mixed_float16")
    return task


def memory():
    """Tasks of `remat.py`, `attention.py` and `states.py` that tell memory."""
    remat = workloads.load("remat.py", __file__).tasks
    attention = workloads.load("attention.py", __file__).tasks.bfloat16_causal
    attention.sequence_lengths = (4096,)
    states = workloads.load("states.py", __file__).tasks
    states.slots_float32.modes = ("mixed_bfloat16",)
    kept = ("slots_float32", "slots_8bit", "slots_8bit_weights_bfloat16")
    found = {f"blocks_{name}": task for name, task in remat.items()}
    for task in found.values():
        task.modes, task.beside = ("mixed_bfloat16",), "blocks_kept"
    return {**found, "attention": attention, **{name: states[name] for name in kept}}
