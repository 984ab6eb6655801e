"""What scripts/doctor.py says: of this machine, of a simulated device, of a recipe."""

import json
import pathlib
import re

import helpers
import pytest
import tensorflow as tf

import tfamp

ROOT = pathlib.Path(__file__).parents[2]
DIGITS = f"--config={ROOT / 'configs/cnn/digits.py'}"
MODE = "--config.precision.mode"
SIMULATED = {
    # Device -> the mode that is chosen, and the format of a graph rewrite.
    "a100": ("mixed_bfloat16", "float16"),
    "v100": ("mixed_float16", "float16"),
    "t4": ("mixed_float16", "float16"),
    "gtx1660": ("float32", "no"),
    "tpu": ("mixed_bfloat16", "no"),
}
COMMANDS = {
    "machine": ["--output=machine.md"],
    **{device: [f"--simulate={device}"] for device in SIMULATED},
    "recipe": [DIGITS, "--simulate=a100", "--output=recipe.json"],
    "slow": [DIGITS, "--simulate=v100", f"{MODE}=mixed_bfloat16"],
    "rewrite": [DIGITS, "--simulate=a100", "--config.precision.graph_rewrite=True"],
    "island": [
        *(DIGITS, "--simulate=v100", f"{MODE}=mixed_float16"),
        "--config.precision.overrides=(('conv.*', 'float32'),)",
    ],
    **{
        name: [f"--config={ROOT}/configs/{name}.py", "--simulate=a100"]
        for name in ("bert/docstrings", "lm/docstrings", "tabular/rossmann")
    },
    "host": [DIGITS, f"{MODE}=float32", "--output=host.md"],
    "strategy": [DIGITS, "--simulate=a100", "--config.strategy=mirrored"],
}
BAD = {
    "two mechanisms": (
        [
            *(DIGITS, "--simulate=a100", "--config.precision.graph_rewrite=True"),
            "--config.precision.overrides=(('conv.*', 'float32'),)",
        ],
        "knows no layers",
    ),
    "device": (["--simulate=a1000"], "Did you mean 'a100'"),
    "mode": ([DIGITS, f"{MODE}=x"], "Unknown precision mode"),
    "stray": (["stray"], "stray"),
    "output": (["--output=absent/x.md"], "absent/x.md"),
    "no file": (["--config=absent.py"], "absent.py"),
    "override": (
        [
            *(DIGITS, "--simulate=a100"),
            "--config.precision.overrides=(('no_such_layer', 'float32'),)",
        ],
        "no_such_layer",
    ),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder, and how each command ended."""
    folder = tmp_path_factory.mktemp("doctor")
    commands = {**COMMANDS, **{name: given for name, (given, _) in BAD.items()}}
    script = ROOT / "scripts/doctor.py"
    results = helpers.run_scripts(
        [(script, given, folder) for given in commands.values()]
    )
    return folder, dict(zip(commands, results, strict=True))


def stdout_of(finished, name):
    code, stdout, stderr = finished[1][name]
    assert code == 0, stderr
    return stdout


def test_this_machine(finished):
    stdout = stdout_of(finished, "machine")
    assert stdout.startswith("# This machine trains on: ")
    for phrase in (tf.__version__, "oneDNN", "TF32 flag", "op determinism"):
        assert phrase in stdout
    written = (finished[0] / "machine.md").read_text()
    for device, formats in tfamp.detect_support().items():
        for name, support in formats.items():
            assert re.search(rf"\| {re.escape(device)} +\| {name} +\|", written)
            assert support.reason in stdout


@pytest.mark.parametrize("device", SIMULATED)
def test_simulated_device_is_named_so_and_tells_nothing_of_this_host(finished, device):
    stdout = stdout_of(finished, device)
    mode, rewrite = SIMULATED[device]
    assert stdout.startswith("# Simulated device: ")
    assert re.search(rf"\| mode +\| {mode} +\|", stdout)
    assert re.search(rf"\| graph rewrite +\| {rewrite} +\|", stdout)
    assert tf.__version__ not in stdout


def test_recipe(finished):
    stdout = stdout_of(finished, "recipe")
    assert stdout.startswith("Mode of the recipe: mixed_bfloat16\n# Audit of 'cnn'")
    content = json.loads((finished[0] / "recipe.json").read_text())
    assert content["machine"]["simulated"] and content["mode"] == "mixed_bfloat16"
    audit = content["audit"]
    assert set(audit["formats"]) == {"bfloat16", "tf32"} and audit["jit_compile"]
    assert not [x for x in audit["findings"] if x["share"] is None]  # Accuracy is well.


@pytest.mark.parametrize(
    "name", ["bert/docstrings", "lm/docstrings", "tabular/rossmann"]
)
def test_recipe_of_each_kind_needs_no_data_on_disk(finished, name):
    assert "# Audit of " in stdout_of(finished, name)


def test_recipe_in_a_format_that_is_slow_there(finished):
    stdout = stdout_of(finished, "slow")
    assert "bfloat16 is not the fast format" in stdout
    assert "tfamp.enable('mixed_float16')" in stdout


def test_recipe_with_a_graph_rewrite(finished):
    stdout = stdout_of(finished, "rewrite")
    assert stdout.startswith("Mode of the recipe: graph rewrite to float16\n")
    assert "float16 100%" in stdout


def test_override_of_a_recipe_is_an_island(finished):
    stdout = stdout_of(finished, "island")
    assert "float32 layers in a 16-bit model" in stdout and "conv" in stdout


def test_recipe_on_this_host_is_written_as_markdown(finished):
    assert "float32 100%" in stdout_of(finished, "host")
    text = (finished[0] / "host.md").read_text()
    assert "# This machine trains on" in text and "# Audit of 'cnn'" in text
    assert sorted(path.name for path in finished[0].iterdir()) == [
        *("host.md", "machine.md", "recipe.json")  # Nothing was trained.
    ]


def test_xla_of_a_recipe_is_that_of_its_training(finished):
    assert "XLA on" in stdout_of(finished, "recipe")
    assert "XLA off" in stdout_of(finished, "strategy")


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_1(finished, name):
    code, stdout, stderr = finished[1][name]
    assert code == 1 and stdout == ""
    (line,) = [x for x in stderr.splitlines() if x.startswith("error: ")]
    assert BAD[name][1] in line
