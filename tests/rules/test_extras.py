"""Each package of an extra: what needs it says which extra brings it."""

import ast
import configparser
import pathlib
import re
import runpy
import sys

import keras
import pytest
import tensorflow as tf

import tfamp
from tfamp import extras, training
from tfamp.recipes import images, segmentation, tabular
from tfamp.recipes import text_classification as texts
from tfamp.recipes.tasks import language_model as modeling

ROOT = pathlib.Path(__file__).parents[2]
# Import name -> name of the package; of others it is the same.
PACKAGES = {"PIL": "pillow", "sklearn": "scikit-learn", "huggingface_hub": "tokenizers"}


def names_in_setup(extra):
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options.extras_require"][extra].split("\n")
    return {re.split(r"[^\w.-]", line)[0].replace("-", "_") for line in lines}


def required():
    """Yields the literals that the sources give to `extras.require`."""
    for path in (ROOT / "tfamp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                "extras.require"
            ):
                yield from (x.value for x in node.args if isinstance(x, ast.Constant))


def test_every_package_is_in_the_extra_that_is_named():
    for package, extra in extras.EXTRAS.items():
        name = PACKAGES.get(package, package).replace("-", "_")
        assert name in names_in_setup(extra), package
    assert {name.partition(".")[0] for name in required()} <= {*extras.EXTRAS}


# ---- What a user calls ----


def build():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def config_of(name, **data):
    path = ROOT / f"configs/{name}.py"
    config = runpy.run_path(str(path))["get_config"]()
    config.data.update(data)
    return config


def digits(folder):
    images.create(config_of("cnn/digits"))


def mnist(folder):
    images.create(config_of("cnn/mnist"))


def folder_of_images(folder):
    for name in ("a", "b"):
        (folder / name).mkdir()
        for number in range(5):
            (folder / name / f"{number}.png").write_bytes(b"")
    config = images.get_config()
    config.data.name, config.manual_dir = "own", str(folder)
    images.create(config)


def photographs(folder):
    segmentation.create(config_of("unet/digits_on_photographs"))


def own_texts(folder):
    (folder / "train.csv").write_text("text,label\n" + "good,1\nbad,0\n" * 9)
    config = config_of("bert/csv")
    config.data_dir = str(folder)
    texts.create(config)


def preset(folder, name=""):
    config = config_of("bert/docstrings")
    config.model.preset = name or str(folder)
    texts.synthetic(config)


def downloaded(folder):
    preset(folder, "hf://some/model")


def table(folder):
    tabular.create(config_of("tabular/diabetes"))


def parquet(folder):
    (folder / "day.parquet").write_bytes(b"")
    config = config_of("tabular/bike_sharing", table_file="day.parquet")
    config.data_dir = str(folder)
    tabular.create(config)


def perplexity(folder):
    modeling._metrics()


def compared(folder):
    x = tf.zeros((4, 2)).numpy()
    training.compare_modes(build, (x, x[:, :1]), test=(x, x[:, :1]), workdir=folder)


def searched(folder):
    tfamp.find_batch_size(f"{__file__}:build")


def timed(folder):
    tfamp.benchmark_model(f"{__file__}:build")


def drawn(folder):
    batch = tf.zeros((4, 2)), tf.zeros((4, 1))
    tfamp.memory(build(), batch).figure()


CALLS = [
    ("sklearn", "data", digits),
    ("tensorflow_datasets", "data", mnist),
    ("PIL", "data", folder_of_images),
    ("PIL", "data", photographs),
    ("sklearn", "data", photographs),
    ("pandas", "data", own_texts),
    ("sklearn", "data", own_texts),
    ("pandas", "data", table),
    ("sklearn", "data", table),
    ("pyarrow", "data", parquet),
    ("filelock", "data", compared),
    ("scipy", "data", compared),
    ("psutil", "data", searched),
    ("keras_hub", "bert", preset),
    ("tokenizers", "bert", preset),
    ("safetensors", "bert", preset),
    ("huggingface_hub", "bert", downloaded),
    ("keras_hub", "bert", perplexity),
    ("jinja2", "plot", timed),
    ("matplotlib", "plot", timed),
    ("scipy", "data", timed),
    ("matplotlib", "plot", drawn),
]


@pytest.mark.parametrize(("package", "extra", "call"), CALLS)
def test_what_lacks_a_package_names_its_extra(
    package, extra, call, monkeypatch, tmp_path
):
    for name in [x for x in sys.modules if x.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    words = rf'{package} is needed here, .*pip install "tfamp\[{extra}\]"'
    with pytest.raises(ImportError, match=words) as caught:
        call(tmp_path)
    assert "\n" not in str(caught.value)


def test_each_package_has_a_call_or_is_of_onnx():
    called = {package for package, *_ in CALLS}
    onnx = {name for name, extra in extras.EXTRAS.items() if extra == "onnx"}
    assert called | onnx == {*extras.EXTRAS}
