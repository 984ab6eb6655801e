"""Docstrings of installed packages: where float16 needs loss scaling.

    python scripts/train_lm.py

Trains in float32 and in mixed_float16 without and with loss scaling. Expected: test
perplexity 337.4, 718.2 and 337.2; the validation perplexity of the second rises from
866 after the first epoch to 1158 after the last. Other versions of the packages are
another text. Time: half an hour on 2 cores of an AMD EPYC that had much other work
besides.

Why: of a mean over 8192 tokens, the gradient at a logit is p / 8192 for each word that
did not come. Half of float16's smallest subnormal is 3e-8, so that without loss scaling
words of p below 2.4e-4 are never pushed down, which is twice the mean of the vocabulary
of 8192: 94 % of the gradient values become 0 (`kept_gradients`, `precision.md` in each
run's folder). The word that came is pushed up in full, and the sum of the others rises.
With the product in float32 (`--config.model.float32_head=True`) float16 without loss
scaling comes to 355.7.
Micikevicius et al., "Mixed Precision Training", 2018, https://arxiv.org/abs/1710.03740,
saw their "bigLSTM" diverge without loss scaling, too. For another mode than
mixed_float16 add `--config.compare_unscaled=False`.
"""

from tfamp.recipes import language_model


def get_config():
    """Returns the configuration."""
    config = language_model.get_config("docstrings")
    config.name = "docstrings"
    config.epochs = 4
    config.batch_size = 256
    config.optimizer.learning_rate = 1e-2
    config.optimizer.schedule = "constant"  # It is still learning at the end.
    config.optimizer.warmup_fraction = 0.0
    config.model.embedding_dim = 64
    config.model.units = (64,)
    config.model.dropout = 0.0  # Four epochs over half a million tokens do not overfit.
    config.precision.mode = "mixed_float16"
    config.compare_unscaled = True
    return config
