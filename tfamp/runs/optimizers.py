"""Optimizers from a configuration, and models that are compiled with them."""

import keras

from tfamp.loss_scaling import wrapping
from tfamp.runs import pipeline, tasks
from tfamp.updates import schedules

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
    made = kind(weight_decay=decay, **keywords)
    if decay is not None:
        made.exclude_from_weight_decay(var_names=[_NO_DECAY])
    return made


def build(task: tasks.Task, config) -> tuple[keras.Model, str]:
    """Returns a task's model, compiled for a run, and the name of its first metric."""
    model, metrics = task.build_model(), task.metrics()
    steps = pipeline.steps_per_epoch(task.train, config.batch_size)
    compile_model(
        *(model, config, steps * config.epochs, task.loss, metrics),
        steps_per_execution=pipeline.steps_per_call(steps, config.steps_per_execution),
    )
    return model, metrics[0].name


def compile_model(
    model, config, total_batches: int, loss, metrics, steps_per_execution: int = 1
) -> None:
    """Compiles a model as the runs do; the benchmarks time the same step.

    Args:
      model: A built model; changed in place.
      config: Its `optimizer`, `precision.finite_guard` and `jit_compile` count.
      total_batches: Batches of the whole run, for the learning-rate schedule.
      loss: A Keras loss.
      metrics: Keras metrics.
      steps_per_execution: As in Keras' `compile`; the benchmarks time single steps.
    """
    model_optimizer = create(config.optimizer, total_batches)
    if config.precision.finite_guard and not wrapping.needs_loss_scale(model):
        model_optimizer = wrapping.wrap_optimizer(
            model_optimizer, initial_scale=1.0, dynamic=False
        )
    jit = "auto" if config.jit_compile is None else config.jit_compile
    model.compile(
        model_optimizer,
        loss=loss,
        metrics=metrics,
        jit_compile=jit,
        steps_per_execution=steps_per_execution,
    )
    model.optimizer.build(model.trainable_variables)
