"""A BERT training step in plain Keras, tfamp and PyTorch, from the same weights.

    python scripts/benchmark.py --config=configs/benchmark/bert.py

An encoder of 6 layers of 384 (12 heads, 1536, 30,522 tokens, dropout 0.1), batch 16,
128 random tokens, AdamW with clipping (in PyTorch the fused one).
"""

from tfamp.benchmark import cells, workloads


def get_config():
    """Returns the configuration."""
    config = cells.get_config()
    config.name = "bert"
    config.steps, config.warmup = 10, 3
    encoder = workloads.load("../bert/docstrings.py", __file__)
    encoder.batch_size = 16
    encoder.data.sequence_length = encoder.model.max_sequence_length = 128
    encoder.model.vocabulary_size = 30522
    encoder.model.num_layers, encoder.model.num_heads = 6, 12
    encoder.model.hidden_dim, encoder.model.intermediate_dim = 384, 1536
    encoder.model.dropout = 0.1
    encoder.optimizer.name = "adamw"
    encoder.optimizer.weight_decay = 0.01
    encoder.optimizer.clip_global_norm = 1.0
    config.tasks.bert = cells.get_task(encoder)
    return config
