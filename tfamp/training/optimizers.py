"""Keras optimizers and learning-rate schedules from a configuration."""

import keras

SCHEDULES = ("constant", "linear", "cosine")
NAMES = ("sgd", "adam", "adamw")


@keras.saving.register_keras_serializable(package="tfamp")
class WarmupSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up from 0, then constant, linear or cosine decay to 0.

    ```
    step < warmup_steps   peak * (step + 1) / warmup_steps
    linear                peak * (1 - progress)
    cosine                peak * (1 + cos(pi * progress)) / 2
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    ```

    Args:
      peak: Float. The learning rate after the warm-up.
      total_steps: Int. Steps of the whole run.
      warmup_steps: Int. Steps of the warm-up.
      decay: "constant", "linear" or "cosine".

    References:
      Devlin et al., "BERT", 2019, https://arxiv.org/abs/1810.04805 (linear);
      Loshchilov and Hutter, "SGDR", 2017, https://arxiv.org/abs/1608.03983 (cosine).
    """

    def __init__(self, peak, total_steps, warmup_steps=0, decay="constant"):
        if decay not in SCHEDULES:
            raise ValueError(
                f"Unknown schedule. Received: {decay!r}. Expected one of {SCHEDULES}."
            )
        self.peak = peak
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps
        self.decay = decay

    def __call__(self, step):
        """Returns the learning rate of a step: float32 scalar."""
        ops = keras.ops
        step = ops.cast(step, "float32")
        warmup = float(max(self.warmup_steps, 1))
        rest = float(max(self.total_steps - self.warmup_steps, 1))
        progress = ops.clip((step - self.warmup_steps) / rest, 0.0, 1.0)
        if self.decay == "linear":
            factor = 1.0 - progress
        elif self.decay == "cosine":
            factor = 0.5 * (1.0 + ops.cos(3.141592653589793 * progress))
        else:
            factor = ops.ones_like(progress)
        rising = ops.minimum((step + 1.0) / warmup, 1.0)
        return self.peak * ops.where(step < self.warmup_steps, rising, factor)

    def get_config(self):
        """Returns the constructor's keywords."""
        return {
            "peak": self.peak,
            "total_steps": self.total_steps,
            "warmup_steps": self.warmup_steps,
            "decay": self.decay,
        }


def create(config, total_steps: int) -> keras.optimizers.Optimizer:
    """Builds the optimizer of a run, without loss scaling.

    Args:
      config: The `optimizer` part of the configuration.
      total_steps: Steps of the whole run, for the schedule.

    Returns:
      A Keras optimizer. AdamW decays no bias and no normalization weight.

    Raises:
      ValueError: If a name is unknown.
    """
    rate = WarmupSchedule(
        config.learning_rate,
        total_steps,
        round(total_steps * config.warmup_fraction),
        config.schedule,
    )
    clip = config.clip_global_norm or None
    if config.name == "sgd":
        return keras.optimizers.SGD(rate, momentum=0.9, global_clipnorm=clip)
    if config.name == "adam":
        return keras.optimizers.Adam(rate, global_clipnorm=clip)
    if config.name != "adamw":
        raise ValueError(
            f"Unknown optimizer. Received: {config.name!r}. Expected one of {NAMES}."
        )
    optimizer = keras.optimizers.AdamW(
        rate, weight_decay=config.weight_decay, global_clipnorm=clip
    )
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return optimizer
