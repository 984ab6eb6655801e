"""What TensorFlow does with the flags and files of XLA that tfamp gives it.

Processes that begin, since it reads them once.
"""

import os
import subprocess
import sys

import pytest
import tensorflow as tf

from tfamp.facts import names, xla_cache, xla_flags

RELEASE = ".".join(tf.__version__.split(".")[:2])
NAMES = [name for name in names.NAMES if "ConstantFolding" in name]
_COMPILE = """
import tensorflow as tf
@tf.function(jit_compile=True)
def double(x):
    return x + x
with tf.device("CPU:0"):
    print("RESULT", double(tf.ones([4])).numpy().sum())
"""
_PROBE = """
import os
import tensorflow as tf
from tensorflow.python import pywrap_tfe
FIRST
os.environ["TF_XLA_FLAGS"] = "--tf_xla_disable_constant_folding=true"
print("RESULT", int(pywrap_tfe.TF_GetXlaConstantFoldingDisabled()))
"""


def run(code, **environ):
    """Returns what a process printed as its result, None if it failed; and errors."""
    here = {k: v for k, v in os.environ.items() if not k.endswith("XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=here | environ,
        timeout=300,
    )
    result = done.stdout.partition("RESULT")[2].strip()
    return (result if done.returncode == 0 else None), done.stderr


@pytest.mark.skipif(RELEASE not in xla_flags.KNOWN, reason="a release without flags")
def test_this_release_knows_the_flags():
    flags = " ".join(xla_flags.KNOWN[RELEASE])
    assert run(_COMPILE, XLA_FLAGS=flags)[0] == "8.0"


def test_an_unknown_flag_ends_the_process():
    result, errors = run(_COMPILE, XLA_FLAGS="--xla_gpu_no_such_flag=false")
    assert result is None and "xla_gpu_no_such_flag" in errors


_DUMP = """
import os, sys
import tensorflow as tf
from tfamp.facts import names
@tf.function(jit_compile=True)
def double(x):
    return x + x
with tf.device("CPU:0"):
    for size in SIZES:
        double(tf.ones([size]))
    for folder, size in (("first", 8), ("second", 9)):
        os.environ["XLA_FLAGS"] = "--xla_dump_to=" + folder
        names.symbol(*names.SYMBOLS)(True)
        del os.environ["XLA_FLAGS"]
        double(tf.ones([size]))
print("RESULT", *(len(os.listdir(x)) > 0 for x in ("first", "second")))
"""


@pytest.mark.skipif(RELEASE == "2.19", reason="TensorFlow 2.19 cannot be asked to")
@pytest.mark.parametrize("sizes", ["[]", "[7]"], ids=["nothing yet", "something"])
def test_flags_are_read_when_asked_for(sizes, tmp_path, monkeypatch):
    """Also after XLA has compiled something, and again."""
    monkeypatch.chdir(tmp_path)
    assert run(_DUMP.replace("SIZES", sizes))[0] == "True True"


@pytest.mark.parametrize(
    ("first", "read_now"),
    [
        ("tf.function(lambda x: x)", True),
        ("tf.config.list_physical_devices()", False),
        ("tf.Variable(1.0)", False),
    ],
)
def test_whether_flags_were_read_before_can_be_asked(first, read_now):
    assert all(names.resolve(name) for name in NAMES) and len(NAMES) == 2
    assert run(_PROBE.replace("FIRST", first))[0] == str(int(read_now))


def test_a_program_on_disk_is_whole_and_a_part_of_it_is_an_error(tmp_path):
    folder = tmp_path / "two words"
    flags = {"TF_XLA_FLAGS": f'--tf_xla_persistent_cache_directory="{folder}"'}
    assert run(_COMPILE, **flags)[0] == "8.0"
    (file,) = folder.iterdir()
    assert file.suffix == ".pb" and xla_cache.is_whole(file)
    written = file.read_bytes()
    for broken in (b"", b"garbage", written[:-1], written[: len(written) // 2]):
        file.write_bytes(broken)
        assert not xla_cache.is_whole(file)
    assert run(_COMPILE, **flags)[0] is None
    gpu = {"TF_XLA_FLAGS": f"{flags['TF_XLA_FLAGS']} {xla_cache.GPU_ALONE}"}
    file.unlink()
    assert run(_COMPILE, **gpu)[0] == "8.0"
    assert not any(folder.iterdir())  # The CPU's are not kept.
