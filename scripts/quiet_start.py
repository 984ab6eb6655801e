"""Imports TensorFlow without the lines that it writes at each start.

Two of its libraries each write the same lines (oneDNN is on, there are no CUDA
drivers), before they know of TF_CPP_MIN_LOG_LEVEL. Set that variable to see all.
"""

import os
import pathlib
import sys
import tempfile

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
_NOISE = b"All log messages before absl", b"oneDNN custom operations", b"cudart_stub"

if "tensorflow" not in sys.modules and "TF_CPP_MIN_LOG_LEVEL" not in os.environ:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # Read when TensorFlow starts.
    with tempfile.TemporaryFile() as written:
        stderr = os.dup(2)
        os.dup2(written.fileno(), 2)
        try:
            import tensorflow  # noqa: F401
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            written.seek(0)
            for line in written:
                if not any(words in line for words in _NOISE):
                    sys.stderr.write(line.decode(errors="replace"))
