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


def steps_per_call(steps: int, asked: int) -> int:
    """Returns how many of an epoch's steps a call of `fit` takes: a divisor.

    Keras takes a call's batches off one iterator over all epochs: a last call that is
    not full would take those of the next epoch.

    Args:
      steps: Steps of an epoch.
      asked: The most that a call may take.
    """
    return max(n for n in range(1, min(asked, steps) + 1) if steps % n == 0)


def training_batches(
    dataset: tf.data.Dataset,
    *,
    batch_size: int,
    seed: int,
    first_epoch: int,
    last_epoch: int,
    augment: Callable | None = None,
    buffer: int = 65_536,
) -> tf.data.Dataset:
    """Returns the batches of epochs [first_epoch, last_epoch), one after another.

    Each epoch is shuffled with a seed of its own, so a run that resumes at epoch k
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

    Returns:
      A dataset of batches.
    """
    buffer = min(int(dataset.cardinality()), buffer)

    first = seed * 2**20  # Of epochs: no two runs of a seed list share one's order.

    def one_epoch(epoch):
        shuffled = dataset.shuffle(
            buffer, seed=first + epoch, reshuffle_each_iteration=False
        )
        if augment is not None:
            shuffled = shuffled.enumerate().map(
                lambda index, example: augment(*example, seed=[first + epoch, index]),
                num_parallel_calls=tf.data.AUTOTUNE,
                deterministic=True,
            )
        return shuffled.batch(batch_size, drop_remainder=True)

    epochs = _chain([one_epoch(epoch) for epoch in range(first_epoch, last_epoch)])
    return _shared_out(epochs.prefetch(tf.data.AUTOTUNE))


def _chain(datasets):
    """Concatenates datasets; halving keeps the nesting logarithmic."""
    if len(datasets) == 1:
        return datasets[0]
    middle = len(datasets) // 2
    return _chain(datasets[:middle]).concatenate(_chain(datasets[middle:]))


def evaluation_batches(dataset: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
    """Returns a dataset in batches, in its own order, nothing left out."""
    return _shared_out(dataset.batch(batch_size).prefetch(tf.data.AUTOTUNE))


def _shared_out(dataset):
    """Has each worker of a cluster take its part of every batch, not its files."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    return dataset.with_options(options)
