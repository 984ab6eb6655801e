"""Each package of an extra: what needs it says which extra brings it."""

import ast
import configparser
import re
import sys

import helpers
import keras
import pytest
import tensorflow as tf

import tfamp
from tfamp import extras, training
from tfamp.measuring import workloads
from tfamp.recipes import images, segmentation, tabular
from tfamp.recipes import text_classification as texts
from tfamp.recipes.tasks import language_model as modeling

# Import name -> name of the package; of others it is the same.
PACKAGES = {"PIL": "pillow", "sklearn": "scikit-learn", "huggingface_hub": "tokenizers"}


def names_in_setup(extra):
    setup = configparser.ConfigParser()
    setup.read(helpers.ROOT / "setup.cfg")
    lines = setup["options.extras_require"][extra].split("\n")
    return {re.split(r"[^\w.-]", line)[0].replace("-", "_") for line in lines}


def required():
    """Yields the literals that the sources give to `extras.require`."""
    for path in (helpers.ROOT / "tfamp").rglob("*.py"):
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


def of(name, create, *folders, **fields):
    """Returns what makes something of a file of `configs/`, of data in a folder.

    Args:
      name: Of the file.
      create: What a recipe makes of it.
      *folders: The fields that name the folder.
      **fields: Others; `__` for a dot.
    """

    def call(folder):
        given = {**fields, **dict.fromkeys(folders, str(folder))}
        config = workloads.load(helpers.ROOT / f"configs/{name}.py")
        create(helpers.with_fields(config, **given))

    return call


@pytest.fixture
def folder(tmp_path):
    """A folder with images, a table and texts."""
    for file in [f"{name}/{number}.png" for name in "ab" for number in range(5)]:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"")
    (tmp_path / "train.csv").write_text("text,label\n" + "good,1\nbad,0\n" * 9)
    (tmp_path / "day.parquet").write_bytes(b"")
    return tmp_path


digits, mnist = of("cnn/digits", images.create), of("cnn/mnist", images.create)
folder_of_images = of("cnn/digits", images.create, "manual_dir", data__name="own")
photographs = of("unet/digits_on_photographs", segmentation.create)
own_texts = of("bert/csv", texts.create, "data_dir")
preset = of("bert/docstrings", texts.synthetic, "model__preset")
downloaded = of("bert/docstrings", texts.synthetic, model__preset="hf://some/model")
table = of("tabular/diabetes", tabular.create)
parquet = of(
    "tabular/bike_sharing", tabular.create, "data_dir", data__table_file="day.parquet"
)


def perplexity(folder):
    modeling._metrics()


def compared(folder):
    x = tf.zeros((4, 2)).numpy()
    parts = {"train": (x, x[:, :1]), "test": (x, x[:, :1])}
    training.compare_modes(build, workdir=folder / "runs", **parts)


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
    package, extra, call, monkeypatch, folder
):
    for name in [x for x in sys.modules if x.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    words = rf'{package} is needed here, .*pip install "tfamp\[{extra}\]"'
    with helpers.one_line(ImportError, words):
        call(folder)


def test_each_package_has_a_call_or_is_of_onnx():
    called = {package for package, *_ in CALLS}
    onnx = {name for name, extra in extras.EXTRAS.items() if extra == "onnx"}
    assert called | onnx == {*extras.EXTRAS}
