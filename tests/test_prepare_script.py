"""The command line of prepare_data.py: a table, or an error in one line."""

import pathlib

import helpers
import pytest

ROOT = pathlib.Path(__file__).parents[1]
TSV = "sentence\tlabel\n" + "".join(f"text {n}\t{n % 2}\n" for n in range(24))
SST2 = ["--format=glue", "--name=glue/sst2", "--source_dir=.", "--data_dir=data"]
# Arguments, and what the one line says.
BAD = [
    (["--format=glue", "--name=glue/sst2", "--source_dir=."], "--data_dir"),
    ([*SST2, "--format=xml"], "--format=xml"),
    ([*SST2, "--source_dir=absent"], "'absent'"),
    ([*SST2, "--name=glue/mrpc"], "'Quality'"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """How each command ended: the bad ones, then preparing twice."""
    pytest.importorskip("tensorflow_datasets")
    folder = tmp_path_factory.mktemp("prepare")
    for name in ("train.tsv", "dev.tsv"):
        (folder / name).write_text(TSV)
    script = ROOT / "scripts" / "prepare_data.py"
    commands = [(script, arguments, folder) for arguments, _ in BAD]
    commands += [(script, SST2, folder), (script, SST2, folder)]
    return folder, helpers.run_scripts(commands)


@pytest.mark.parametrize(
    ("number", "phrase"), [(n, phrase) for n, (_, phrase) in enumerate(BAD)]
)
def test_bad_input_is_one_line_and_exit_code_1(finished, number, phrase):
    result = finished[1][number]
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    (line,) = [x for x in result.stderr.splitlines() if x.startswith("error: ")]
    assert phrase in line
    assert result.stdout == ""


def test_table_says_what_was_written_and_nothing_is_overwritten(finished):
    folder, results = finished
    first, again = results[len(BAD) :]
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[:3] == [
        "split       examples  classes",
        "train             24        2",
        "validation        24        2",
    ]
    assert (folder / "data/glue/sst2/2.0.0/dataset_info.json").exists()
    assert again.returncode == 1 and "--overwrite" in again.stderr
