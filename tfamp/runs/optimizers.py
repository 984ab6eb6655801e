"""Keras optimizers and learning-rate schedules from a configuration."""

import keras

from tfamp.updates import schedules

SCHEDULES = ("constant", "linear", "cosine")
NAMES = ("sgd", "adam", "adamw")
# Keras searches for it in a variable's path as TensorFlow names it, for example
# "beta_net/dense/bias:0" or, on the second replica, "beta_net/dense/bias/replica_1:0".
_NO_DECAY = r"(^|/)(bias|gamma|beta)(/replica_\d+)?(:\d+)?$"


def create(config, total_batches: int) -> keras.optimizers.Optimizer:
    """Builds the optimizer of a run, without loss scaling.

    Each update of the weights uses the mean gradient of
    `config.optimizer.accumulation_steps` batches, clipped after averaging. Up to
    rounding, this is the update of one batch that is so many times larger. Warm-up and
    decay count updates. An incomplete window at the end of a run is dropped.

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
        "learning_rate": schedules.WarmupSchedule(
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
    optimizer = kind(weight_decay=decay, **keywords)
    if decay is not None:
        optimizer.exclude_from_weight_decay(var_names=[_NO_DECAY])
    return optimizer
