"""Batches whose order depends on the seed and the epoch alone."""

from collections.abc import Callable

import tensorflow as tf

from tfamp import errors


def steps_per_epoch(dataset: tf.data.Dataset, batch_size: int) -> int:
    """Returns the number of whole batches in a dataset.

    Raises:
      DataError: If there is not one.
    """
    examples = int(dataset.cardinality())
    if examples < batch_size:
        raise errors.DataError(
            f"The training data do not fill one batch. Received: {examples} examples, "
            f"batch_size={batch_size}. Lower config.batch_size."
        )
    return examples // batch_size


def steps_per_call(steps: int, limit: int) -> int:
    """Returns how many of an epoch's steps a call of `fit` takes: a divisor.

    Keras takes a call's batches off one iterator over all epochs: a last call that is
    not full would take those of the next epoch.

    Args:
      steps: Steps of an epoch.
      limit: The most that a call may take.
    """
    return max(n for n in range(1, min(limit, steps) + 1) if steps % n == 0)


def training_batches(
    dataset: tf.data.Dataset,
    *,
    batch_size: int,
    seed: int,
    first_epoch: int,
    last_epoch: int,
    augment: Callable | None = None,
    buffer: int = 65_536,
    share: tf.distribute.InputContext | None = None,
) -> tf.data.Dataset:
    """Returns the batches of epochs [first_epoch, last_epoch), one after another.

    Each epoch is shuffled with its own seed, so a run that resumes at epoch k
    sees what the uninterrupted run saw from there on. What does not fill a batch
    at the end of an epoch is left out of it; the next epoch shuffles anew.

    Args:
      dataset: Unbatched (features, label), of known cardinality and fixed order.
      batch_size: Examples in a batch.
      seed: The run's seed.
      first_epoch: First epoch, from 0.
      last_epoch: One more than the last epoch.
      augment: As in `tasks.Task`.
      buffer: Examples in the shuffle buffer; all of a smaller dataset.
      share: Which worker asks: it gets its examples of each batch, one batch for each
        of its replicas, and augments no others. None: all of them.

    Returns:
      A dataset of batches.
    """
    examples = int(dataset.cardinality())
    first = seed * 2**20  # Of epochs: no two runs of a seed list share one's order.

    def one_epoch(epoch):
        whole = dataset.shuffle(
            min(examples, buffer), seed=first + epoch, reshuffle_each_iteration=False
        ).take(examples // batch_size * batch_size)
        return augmented(whole, augment, first + epoch, share).batch(size, True)

    size = share.get_per_replica_batch_size(batch_size) if share else batch_size
    epochs = [one_epoch(epoch) for epoch in range(first_epoch, last_epoch)]
    return _chain(epochs).prefetch(tf.data.AUTOTUNE)


def augmented(
    dataset: tf.data.Dataset,
    augment: Callable | None,
    seed: int = 0,
    share: tf.distribute.InputContext | None = None,
) -> tf.data.Dataset:
    """Returns training examples as the model gets them, in the order they are in.

    Args:
      dataset: Unbatched, as of a task.
      augment: As in `tasks.Task`.
      seed: Of an epoch.
      share: As in `training_batches`.
    """
    examples = dataset if augment is None else dataset.enumerate()
    if share is not None:
        examples = examples.shard(share.num_input_pipelines, share.input_pipeline_id)
    if augment is None:
        return examples
    return examples.map(
        lambda index, example: augment(*example, seed=[seed, index]),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )


def _chain(datasets):
    """Concatenates datasets; halving keeps the nesting logarithmic."""
    if len(datasets) == 1:
        return datasets[0]
    middle = len(datasets) // 2
    return _chain(datasets[:middle]).concatenate(_chain(datasets[middle:]))


def evaluation_batches(dataset: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
    """Returns a dataset in batches, in its own order, nothing left out.

    Each worker of a cluster takes its part of every batch. Sharing out files instead
    would do so before the examples are counted that a split takes or leaves out.
    """
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    return dataset.batch(batch_size).prefetch(tf.data.AUTOTUNE).with_options(options)
