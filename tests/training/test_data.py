import socket
import time

import pytest
import tensorflow as tf

import tfamp
from tfamp.training import data


@pytest.fixture
def offline(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_hold_out_parts_are_disjoint_and_not_empty():
    numbers = tf.data.Dataset.range(10)
    for fraction, held in ((0.3, 3), (0.01, 1), (0.99, 9)):
        first, second = data.hold_out(numbers, fraction)
        assert int(second.cardinality()) == held
        both = [*first.as_numpy_iterator(), *second.as_numpy_iterator()]
        assert both == list(range(10))


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 2])
def test_hold_out_refuses_shares_that_leave_a_part_empty(fraction):
    with pytest.raises(ValueError, match=f"validation_fraction={fraction}"):
        data.hold_out(tf.data.Dataset.range(10), fraction)


def test_unprepared_data_without_network_are_refused_at_once(tmp_path, offline):
    start = time.monotonic()
    with pytest.raises(tfamp.DataError, match="--manual_dir.*--data_dir"):
        data.load_tfds("mnist", str(tmp_path), None)
    # TFDS retries for 200 s; half of that is no tight limit on any machine.
    assert time.monotonic() - start < 100


def test_manual_folder_without_the_files_is_refused_at_once(tmp_path, offline):
    (tmp_path / "manual").mkdir()
    with pytest.raises(tfamp.DataError, match="train-images-idx3-ubyte.gz"):
        data.load_tfds("mnist", str(tmp_path), str(tmp_path / "manual"))
    with pytest.raises(tfamp.DataError, match="must be a folder"):
        data.load_tfds("mnist", str(tmp_path), str(tmp_path / "absent"))


def test_file_with_other_bytes_is_refused(tmp_path, offline, shared_data):
    source = shared_data("mnist")
    manual = tmp_path / "manual"
    manual.mkdir()
    for file in source.iterdir():
        (manual / file.name).write_bytes(file.read_bytes())
    (manual / "t10k-labels-idx1-ubyte.gz").write_bytes(b"not the original")
    with pytest.raises(tfamp.DataError, match="Checksum"):
        data.load_tfds("mnist", str(tmp_path), str(manual))


def test_unknown_data_set_is_named(tmp_path):
    with pytest.raises(tfamp.DataError, match="mnits"):
        data.load_tfds("mnits", str(tmp_path), None)
