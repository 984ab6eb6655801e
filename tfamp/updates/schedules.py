"""Learning-rate schedules of the training scripts, which saved models name."""

import keras


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
