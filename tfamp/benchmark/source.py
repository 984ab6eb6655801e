"""The batches of a cell: those that a run trains on, or random ones."""

import math

import keras

from tfamp.training import benchmark_inputs, pipeline, tasks


def create(config, synthetic: bool, steps: int) -> tuple[tasks.Synthetic, str]:
    """Seeds this process, describes a cell's model and makes its batches.

    TensorFlow's shuffling depends on the global seed, too: without it the twin in
    PyTorch would be given other batches than the cell draws.

    Args:
      config: The training configuration of the cell.
      synthetic: Whether batches are random, of the shapes that the task has.
      steps: How many batches are needed. Smaller data are gone through again, within a
        batch, too.

    Returns:
      (model and batches, name of the metric). Random labels have no metric worth
      comparing: "" then, and where the task's first metric is an error.

    Raises:
      DataError: If the data are missing or malformed.
      ValueError: If a setting makes no sense.
    """
    keras.utils.set_random_seed(config.seed)
    if synthetic:
        return benchmark_inputs.create(config), ""
    task = tasks.from_config(config)
    name = task.metrics()[0].name
    return (
        tasks.Synthetic(
            task.build_model,
            _batches(config, task, steps),
            task.description,
            task.loss,
            task.metrics,
            benchmark_inputs.unit(config.task),
        ),
        "" if name in task.errors else name,
    )


def _batches(config, task, steps):
    """The batches that `fit` draws."""
    examples = int(task.train.cardinality())
    train = task.train.cache() if config.data.cache else task.train
    train = train.repeat(math.ceil(config.batch_size / examples))
    epochs = math.ceil(steps / pipeline.steps_per_epoch(train, config.batch_size))
    return pipeline.training_batches(
        train,
        batch_size=config.batch_size,
        seed=config.seed,
        first_epoch=0,
        last_epoch=epochs,
        augment=task.augment,
    )
