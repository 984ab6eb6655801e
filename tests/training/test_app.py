"""What the scripts share, without a process: folders and what is not shown."""

import pytest
import tensorflow as tf

from tfamp.training import app, base_config


def test_train_and_compare_have_folders_of_their_own():
    config = base_config.get_cnn_config()
    config.name = "digits"
    folders = {job: app.default_workdir(config, job).name for job in app.JOBS[:2]}
    assert folders["compare"].startswith("digits-")
    assert folders["train"].startswith("digits-train-")
    config.epochs += 1
    assert app.default_workdir(config, "train").name != folders["train"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("5 out of the last 13 calls to f triggered tf.function retracing.", False),
        ("Something else", True),
    ],
    ids=["retracing", "other"],
)
def test_retracing_of_several_models_is_not_told(text, shown):
    record = tf.get_logger().makeRecord("tensorflow", 30, "", 0, text, (), None)
    assert app._is_of_interest(record) is shown
