"""The private names of TensorFlow that tfamp uses are there and mean what it reads."""

import os
import subprocess
import sys

from tensorflow.python.util import _pywrap_util_port

from tfamp import hardware

_READ_ONEDNN = """
from tensorflow.python.util import _pywrap_util_port
print("RESULT", _pywrap_util_port.IsMklEnabled())
"""


def test_onednn_switch_is_read_as_a_bool():
    assert isinstance(_pywrap_util_port.IsMklEnabled(), bool)
    assert hardware._onednn_is_on() is _pywrap_util_port.IsMklEnabled()


def test_onednn_switch_follows_the_environment():
    environ = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"}
    run = subprocess.run(
        [sys.executable, "-c", _READ_ONEDNN],
        capture_output=True,
        text=True,
        env=environ,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["RESULT", "False"]
