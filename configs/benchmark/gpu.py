"""What a GPU is for: BERT-Base, a ResNet and a wide CNN in every mode, and memory.

    python scripts/benchmark.py --config=configs/benchmark/gpu.py
    python scripts/benchmark.py --config=configs/benchmark/gpu.py:plan

On random batches, with new weights: needs no data. BERT-Base has SQuAD's length of 384.
Memory is the allocator's peak: of blocks that are computed again, long attention, and
slots of 8 bits. Time to accuracy is that of `quick.py`, whose network is small for a
GPU.

Not measured yet, since no GPU was at hand. The whole has some 150 processes, an hour or
more; `plan` has a fifth of them, once each, for `scripts/gpu_plan.py`. Resumable;
`--tasks=bert_base` runs one task.
"""

from tfamp.benchmark import cells, workloads

MIXED = ("mixed_bfloat16", "mixed_float16")


def get_config(form="whole"):
    """Returns the configuration.

    Args:
      form: "whole"; "plan" for one process of each cell, without time to accuracy.
    """
    short = form == "plan"
    config = workloads.load("quick.py", __file__)
    config.name = "gpu_plan" if short else "gpu"
    config.repeats = 1 if short else 3  # 3 are the least that tell noise.
    config.steps, config.warmup = 30, 10
    config.tasks = {
        "bert_base": synthetic("../bert/squad.py", 32),
        "resnet": synthetic("../cnn/cifar10_resnet.py", 512),
        "mnist_wide": synthetic("../cnn/mnist_wide.py", 512),
        **memory(),
    }
    if short:
        config.time_to_accuracy = {}
        del config.tasks.mnist_wide
        for task in (config.tasks.bert_base, config.tasks.resnet):
            task.slow_modes, task.xla = False, MIXED
            task.frameworks = ("tfamp", "torch")
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
