import pathlib
import time

import helpers
import pytest
import tensorflow as tf

import tfamp
from tfamp.recipes import data
from tfamp.runs import base_config


def test_arrays_of_the_recipes_stay_on_the_host(monkeypatch):
    def find_device(arrays):
        return tf.constant(arrays).device

    monkeypatch.setattr(tf.data.Dataset, "from_tensor_slices", find_device)
    with tf.Graph().as_default(), tf.device("GPU:0"):
        assert find_device(0).endswith("GPU:0")
        assert data.slices(0).endswith("CPU:0")
    texts = [p.read_text() for p in pathlib.Path(data.__file__).parent.glob("*.py")]
    assert sum(text.count(".from_tensor_slices(") for text in texts) == 1


def test_hold_out_parts_are_disjoint_and_not_empty():
    numbers = tf.data.Dataset.range(10)
    for fraction, held in ((0.3, 3), (0.01, 1), (0.99, 9)):
        first, second = data.hold_out(numbers, fraction)
        assert int(second.cardinality()) == held
        both = [*first.as_numpy_iterator(), *second.as_numpy_iterator()]
        assert both == list(range(10))
    assert data.hold_out(numbers, 0) == (numbers, None)
    with pytest.raises(tfamp.DataError, match="Received: 1"):
        data.hold_out(numbers.take(1), 0.5)


def prepare(name, data_dir, manual_dir=""):
    folders = {"data_dir": str(data_dir), "manual_dir": str(manual_dir)}
    config = helpers.configured(base_config, data__name=name, **folders)
    return data.prepared_builder(config)


@pytest.mark.parametrize("manual", ["", "absent"])
def test_unprepared_data_without_network_are_refused_at_once(
    tmp_path, no_network, manual
):
    start = time.monotonic()
    with pytest.raises(tfamp.DataError, match="images.*--manual_dir.*--data_dir"):
        prepare("mnist", tmp_path, manual and tmp_path / manual)
    # TFDS retries for 200 s; half of that is no tight limit on any machine.
    assert time.monotonic() - start < 100


def test_file_with_other_bytes_is_refused(tmp_path, no_network, shared_data):
    for file in shared_data("mnist").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(b"not the original")
    with pytest.raises(tfamp.DataError, match="Checksum"):
        prepare("mnist", tmp_path / "tfds", tmp_path)


def test_unknown_data_set_is_named(tmp_path):
    with pytest.raises(tfamp.DataError, match="mnits"):
        prepare("mnits", tmp_path)
