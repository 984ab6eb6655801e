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
ISLAND = "--config.precision.overrides=(('conv.*', 'float32'),)"
REWRITE = "--config.precision.graph_rewrite=True"
BAD = {
    "does not see layers": [DIGITS, "--simulate=a100", REWRITE, ISLAND],
    "Did you mean 'a100'": ["--simulate=a1000"],
    "Unknown precision mode": [DIGITS, f"{MODE}=x"],
    "stray": ["stray"],
    "absent/x.md": ["--output=absent/x.md"],
    "absent.py": ["--config=absent.py"],
    "no_such_layer": [
        DIGITS,
        "--simulate=a100",
        ISLAND.replace("conv.*", "no_such_layer"),
    ],
}


@pytest.fixture
def doctor(tmp_path):
    """Returns a function: what the script prints."""

    def run(*arguments, code=0):
        script = ROOT / "scripts/doctor.py"
        (done,) = helpers.run_scripts([(script, arguments, tmp_path)])
        assert done.returncode == code, done.stderr
        assert done.stdout if code == 0 else not done.stdout
        return done.stdout or done.stderr

    return run


def test_this_machine(doctor, tmp_path):
    stdout = doctor("--output=machine.md")
    assert stdout.startswith("# This machine trains on: ")
    # As pip has it: 2.22.0rc0, 2.23.0.dev20261026.
    release = tf.__version__.replace("-dev", ".dev").replace("-", "")
    for phrase in (release, "oneDNN", "TF32 flag", "op determinism"):
        assert phrase in stdout
    written = (tmp_path / "machine.md").read_text()
    for device, formats in tfamp.detect_support().items():
        for name, support in formats.items():
            assert re.search(rf"\| {re.escape(device)} +\| {name} +\|", written)
            # conftest.py counts slow units for bfloat16, in this process alone.
            assert name == "bfloat16" or support.reason in stdout


@pytest.mark.parametrize("device", SIMULATED)
def test_simulated_device_is_named_so_and_tells_nothing_of_this_host(doctor, device):
    stdout = doctor(f"--simulate={device}")
    mode, rewrite = SIMULATED[device]
    assert stdout.startswith("# Simulated device: ")
    assert re.search(rf"\| mode +\| {mode} +\|", stdout)
    assert re.search(rf"\| graph rewrite +\| {rewrite} +\|", stdout)
    assert tf.__version__ not in stdout


def test_recipe(doctor, tmp_path):
    stdout = doctor(DIGITS, "--simulate=a100", "--output=recipe.json")
    assert stdout.startswith("Mode of the recipe: mixed_bfloat16\n# Audit of 'cnn'")
    assert "XLA on" in stdout
    content = json.loads((tmp_path / "recipe.json").read_text())
    assert content["machine"]["simulated"] and content["mode"] == "mixed_bfloat16"
    audit = content["audit"]
    assert set(audit["formats"]) == {"bfloat16", "tf32"} and audit["jit_compile"]
    assert not [x for x in audit["findings"] if x["share"] is None]  # Accuracy is well.
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.json"]  # No training.


@pytest.mark.parametrize(
    ("arguments", "phrases"),
    [
        # Recipes of other kinds need no data on disk.
        *(
            ([f"--config={ROOT}/configs/{name}.py", "--simulate=a100"], ["# Audit of "])
            for name in ("bert/docstrings", "lm/docstrings", "tabular/rossmann")
        ),
        (
            [DIGITS, "--simulate=v100", f"{MODE}=mixed_bfloat16"],
            ["units for another format than bfloat16", "tfamp.enable('mixed_float16')"],
        ),
        (
            [DIGITS, "--simulate=a100", REWRITE],
            ["Mode of the recipe: graph rewrite to float16\n", "float16 100%"],
        ),
        (
            [DIGITS, "--simulate=v100", f"{MODE}=mixed_float16", ISLAND],
            ["float32 layers in a 16-bit model", "conv"],
        ),
        # XLA of a recipe is that of its training.
        ([DIGITS, "--simulate=a100", "--config.strategy=mirrored"], ["XLA off"]),
    ],
    ids=["bert", "lm", "tabular", "slow format", "rewrite", "island", "strategy"],
)
def test_recipe_of_another_kind(doctor, arguments, phrases):
    stdout = doctor(*arguments)
    assert [phrase for phrase in phrases if phrase not in stdout] == []


def test_recipe_on_this_host_is_written_as_markdown(doctor, tmp_path):
    assert "float32 100%" in doctor(DIGITS, f"{MODE}=float32", "--output=host.md")
    text = (tmp_path / "host.md").read_text()
    assert "# This machine trains on" in text and "# Audit of 'cnn'" in text


@pytest.mark.parametrize("phrase", BAD)
def test_bad_input_is_one_line_and_exit_code_1(doctor, phrase):
    stderr = doctor(*BAD[phrase], code=1)
    (line,) = [x for x in stderr.splitlines() if x.startswith("error: ")]
    assert phrase in line
