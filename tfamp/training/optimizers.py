"""Keras optimizers and learning-rate schedules from a configuration."""

import keras

SCHEDULES = ("constant", "linear", "cosine")
NAMES = ("sgd", "adam", "adamw")
# Keras searches for it in a variable's path as TensorFlow names it, for example
# "beta_net/dense/bias:0" or, on the second replica, "beta_net/dense/bias/replica_1:0".
_NO_DECAY = r"(^|/)(bias|gamma|beta)(/replica_\d+)?(:\d+)?$"


@keras.saving.register_keras_serializable(package="tfamp")
class WarmupSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up from 0, then constant, linear or cosine decay to 0.

    ```
    step < warmup_steps   peak * (step + 1) / warmup_steps
    linear                peak * (1 - progress)
    cosine                peak * (1 + cos(pi * progress)) / 2
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    ```

    Steps are updates of the weights. Keras calls a schedule with the number of batches
    so far, which under gradient accumulation are more.

    Args:
      peak: Float. The learning rate after the warm-up.
      total_steps: Int. Steps of the whole run.
      warmup_steps: Int. Steps of the warm-up.
      decay: "constant", "linear" or "cosine".
      batches_per_step: Int. Batches of a step: the optimizer's
        `gradient_accumulation_steps`.

    References:
      Devlin et al., "BERT", 2019, https://arxiv.org/abs/1810.04805 (linear);
      Loshchilov and Hutter, "SGDR", 2017, https://arxiv.org/abs/1608.03983 (cosine).
    """

    def __init__(
        self,
        peak,
        total_steps,
        warmup_steps=0,
        decay="constant",
        batches_per_step=1,
    ):
        self.peak = peak
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps
        self.decay = decay
        self.batches_per_step = batches_per_step

    def __call__(self, step):
        """Returns the learning rate at a batch, counted from 0: float32 scalar."""
        ops = keras.ops
        # Whole numbers, before float32 rounds those above 2**24.
        step = ops.cast(ops.floor_divide(step, self.batches_per_step), "float32")
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
        return dict(vars(self))


def create(config, total_batches: int) -> keras.optimizers.Optimizer:
    """Builds the optimizer of a run, without loss scaling.

    `config.accumulation_steps` batches make one update of the weights, by the mean of
    their gradients, clipped after that: up to rounding the update that one batch of
    so many times the size would give. Warm-up and decay count updates. Batches at the
    end of a run that fill no whole window change nothing.

    Args:
      config: The `optimizer` part of the configuration.
      total_batches: Batches of the whole run, for the schedule.

    Returns:
      A Keras optimizer. AdamW and SGD decay no bias and no normalization weight.

    Raises:
      ValueError: If the run is too short for one update.
    """
    steps = config.accumulation_steps
    updates = total_batches // steps
    if updates < 1:
        raise ValueError(
            "`config.optimizer.accumulation_steps` must be at most the batches of the "
            f"whole run, or no weight would change. Received: {steps}, batches: "
            f"{total_batches}."
        )
    warmup = round(updates * config.warmup_fraction)
    keywords = {
        "learning_rate": WarmupSchedule(
            config.learning_rate, updates, warmup, config.schedule, steps
        ),
        "global_clipnorm": config.clip_global_norm or None,
        # Keras takes None or at least 2.
        "gradient_accumulation_steps": steps if steps > 1 else None,
    }
    if config.name == "sgd":
        keywords |= {"momentum": config.momentum, "nesterov": config.nesterov}
        kind, decay = keras.optimizers.SGD, config.weight_decay or None
    else:
        keywords["epsilon"] = config.epsilon
        adamw = config.name == "adamw"
        kind = keras.optimizers.AdamW if adamw else keras.optimizers.Adam
        decay = config.weight_decay if adamw else None
    made = kind(weight_decay=decay, **keywords)
    if decay is not None:
        made.exclude_from_weight_decay(var_names=[_NO_DECAY])
    return made
