"""What the scripts share, without a process: folders and what is not shown."""

import pytest
import tensorflow as tf

import tfamp
from tfamp.training import app, base_config, bert_config
from tfamp.training.tasks import images


def test_train_and_compare_have_folders_of_their_own():
    config = images.get_config()
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


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((("no_such_layer", "float32"),), tfamp.OverrideError),
        ((("logits", "float32"),), None),
    ],
    ids=["no such layer", "right"],
)
def test_check_before_a_deletion_makes_the_model(overrides, expected):
    config = images.get_config()
    config.data.name, config.data.image_size = "digits", 8
    config.limit_examples = 40
    config = base_config.apply_tiny(config)
    config.precision.mode = "mixed_bfloat16"
    config.precision.overrides = overrides
    if expected is None:
        app.check(config)
        return
    with pytest.raises(expected, match="no_such_layer"):
        app.check(config)


def test_check_before_a_deletion_knows_the_columns_of_a_comparison():
    config = images.get_config()
    config.precision.mode, config.compare_unscaled = "mixed_bfloat16", True
    with pytest.raises(ValueError, match="compare_unscaled"):
        app.check(config, "compare")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pooling", "max"),
        ("num_layers", 0),
        ("hidden_dim", 0),
        ("intermediate_dim", 0),
        ("max_sequence_length", 2),
        ("num_heads", 3),  # Of 128.
    ],
)
def test_sizes_of_an_encoder_are_checked_before_any_text_is_read(field, value):
    config = bert_config.get_bert_config()
    base_config.validate(config)
    config.model[field] = value
    with pytest.raises(ValueError, match=rf"config\.model\..*{value}"):
        base_config.validate(config)
    if field == "num_heads":  # Those of a preset are its own.
        config.model.preset = "bert_tiny_en_uncased"
        base_config.validate(config)
