import keras
import pytest
import tensorflow as tf

import tfamp
from tfamp.runs import pipeline


def numbers(count):
    return tf.data.Dataset.from_tensor_slices((tf.range(count), tf.range(count)))


def read(dataset):
    return [batch[0].tolist() for batch in dataset.as_numpy_iterator()]


def epochs(first, last, seed=3, **keywords):
    """Two batches of 4 of 10 numbers for each epoch."""
    batches = pipeline.training_batches(
        numbers(10),
        batch_size=4,
        seed=seed,
        first_epoch=first,
        last_epoch=last,
        **keywords,
    )
    return read(batches)


def test_epochs_differ_and_show_each_example_at_most_once():
    batches = epochs(0, 3)
    assert [len(batch) for batch in batches] == [4] * 6
    first, second = sum(batches[:2], []), sum(batches[2:4], [])
    assert first != second
    assert len(set(first)) == len(set(second)) == 8
    # The seeds of a list share no order.
    assert epochs(1, 2, seed=0) != epochs(0, 1, seed=1)


@pytest.mark.parametrize("first", [1, 2, 6])
def test_resumed_epochs_equal_those_of_the_uninterrupted_run(first):
    keras.utils.set_random_seed(3)
    whole = epochs(0, 7)
    keras.utils.set_random_seed(3)
    assert epochs(first, 7) == whole[2 * first :]


def test_augmentation_differs_by_epoch_and_is_the_same_after_a_resumption():
    def shift(features, label, seed):
        noise = tf.random.stateless_uniform((), seed, maxval=10**6, dtype=tf.int32)
        return features + 10 * noise, label

    whole = epochs(0, 3, augment=shift)
    assert [[x % 10 for x in batch] for batch in whole] == epochs(0, 3)
    noise = [x // 10 for batch in whole for x in batch]
    assert len(set(noise)) == len(noise)
    assert epochs(1, 3, augment=shift) == whole[2:]
    assert epochs(0, 1, seed=4, augment=shift) != whole[:2]


def test_workers_augment_their_own_examples_of_each_batch_alone():
    def note(features, label, seed):
        return features + 100 * tf.cast(seed[1], tf.int32), label

    whole = epochs(0, 3, augment=note)
    shares = [
        epochs(0, 3, augment=note, share=tf.distribute.InputContext(2, worker, 4))
        for worker in (0, 1)
    ]
    # Two replicas each, of one example of a batch of four.
    parts = [[sum(x[i : i + 2], []) for i in range(0, 12, 2)] for x in shares]
    joined = [sorted(a + b) for a, b in zip(*parts, strict=True)]
    assert joined == [sorted(batch) for batch in whole]


def test_evaluation_keeps_the_order_and_leaves_nothing_out():
    batches = read(pipeline.evaluation_batches(numbers(10), 4))
    assert sum(batches, []) == list(range(10))


def test_data_that_fill_no_batch_are_refused():
    with pytest.raises(tfamp.DataError, match="10 examples, batch_size=11"):
        pipeline.steps_per_epoch(numbers(10), 11)
    assert pipeline.steps_per_epoch(numbers(10), 10) == 1
