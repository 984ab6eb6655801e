"""Which releases are refused, which work untested, and what one lacks."""

import pkgutil

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.facts import names, versions
from tfamp.keras_patches import patches


@pytest.mark.parametrize(
    ("tensorflow", "keras_release", "backend", "says"),
    [
        ("2.18.1", "3.15.1", "tensorflow", "Upgrade TensorFlow."),
        ("2.21.0", "3.9.2", "tensorflow", "Upgrade Keras."),
        ("1.15.0", "2.15.0", "tensorflow", "Upgrade TensorFlow and Keras."),
        ("2.21.0", "3.15.1", "jax", "Set KERAS_BACKEND=tensorflow"),
    ],
)
def test_what_cannot_work_is_one_error(
    monkeypatch, tensorflow, keras_release, backend, says
):
    monkeypatch.setattr(tf, "__version__", tensorflow)
    monkeypatch.setattr(keras, "__version__", keras_release)
    monkeypatch.setattr(keras.backend, "backend", lambda: backend)
    with pytest.raises(ImportError) as error:
        versions.check()
    wanted = (tensorflow, keras_release, backend, "2.19 or newer", "3.10 or newer")
    for words in (*wanted, says):
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("tensorflow", "keras_release", "tested"),
    [
        *((*pair, True) for pair in versions.TESTED),
        ("2.21.2", "3.15.0", True),  # Patch releases.
        ("2.20.0", "3.15.1", False),
        ("2.22.0", "3.16.0.dev2026112303", False),
        ("3.0.0rc1", "4.0", False),
    ],
)
def test_status_tells_of_releases_that_were_not_tested(
    monkeypatch, tensorflow, keras_release, tested
):
    monkeypatch.setattr(tf, "__version__", tensorflow)
    monkeypatch.setattr(keras, "__version__", keras_release)
    versions.check()
    told = tfamp.status().versions
    assert f"TensorFlow {tensorflow}, Keras {keras_release}" in told
    assert ("untested" in told) != tested


def every_name():
    """Every private name that tfamp uses, by the first feature that it is for."""
    features = dict(names.NAMES)
    for patch in patches.BY_NAME.values():
        whole = f"{patch.owner}{'.' if ':' in patch.owner else ':'}{patch.name}"
        for name in (whole, *patch.needs):
            features.setdefault(name, patch.what)
    del features["keras:Model.compile"]  # A Keras without it is no Keras.
    return sorted(features, key=lambda name: (features[name], name))


NAMES = every_name()
COUNT = -(-len(NAMES) // 4)
# A training takes seconds: four names, of different features, are missing in each.
GROUPS = {NAMES[i]: NAMES[i::COUNT] for i in range(COUNT)}


@pytest.mark.parametrize("first", helpers.names_of(GROUPS, quick=[*GROUPS][::4]))
def test_a_release_without_names_trains_and_exports(first, monkeypatch, tmp_path):
    """In mixed_float16, which does all that mixed_bfloat16 does and scales the loss."""
    resolve = pkgutil.resolve_name
    lacked = {*GROUPS[first], *map(names.moved, GROUPS[first])}

    def lacking(name):
        if name in lacked:
            raise AttributeError(name)
        return resolve(name)

    monkeypatch.setattr(names.pkgutil, "resolve_name", lacking)
    with helpers.enabled("mixed_float16", on_unsupported="warn") as status:
        missing = patches.missing()
        listed = {each for x in missing.values() for each in x.split(", ")}
        assert listed >= {*GROUPS[first]}
        assert all(what in status.versions for what in missing)
        model = keras.Sequential(
            [
                keras.layers.Dense(4, "gelu"),
                keras.layers.LayerNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse")
        x = np.ones((4, 3), "float32")
        history = model.fit(x, x[:, :1], epochs=2, verbose=0)
        assert np.isfinite(history.history["loss"]).all()
        tfamp.export_float32(model, tmp_path / "model", sample_inputs=x)
