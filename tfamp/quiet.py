"""Imports TensorFlow without the lines that it writes at each start.

Two of its libraries write the same lines (oneDNN is on, there are no CUDA drivers)
before they read `TF_CPP_MIN_LOG_LEVEL`, and where there is no GPU the first look for
one writes an error. The `tfamp` command and `scripts/` run this file before they import
anything else. Where the user has set `TF_CPP_MIN_LOG_LEVEL` to 0 or 1, it does nothing.
"""

import functools
import os
import sys
import tempfile

_NOISE = (
    *(b"All log messages before absl", b"oneDNN custom operations", b"cudart_stub"),
    # TensorFlow 2.19.
    *(b"Unable to register cu", b"computation placer already registered"),
)
# The error of a look for a GPU, and TensorFlow 2.22's trace of it.
_NO_GPU = b"failed call to cuInit", b"=== Source Location Trace", b"/cuda_status.cc:"
# With NVIDIA's driver loaded, a failing look for a GPU is news.
_DRIVER = "/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg"


@functools.cache  # The command changes its arguments.
def is_command() -> bool:
    """Whether this process is the `tfamp` command, or `python -m tfamp`."""
    name = os.path.basename(sys.argv[0] if sys.argv else "")
    argv = sys.orig_argv[1:]
    as_module = "-m" in argv and argv[argv.index("-m") + 1 :][:1] == ["tfamp"]
    return name in ("tfamp", "tfamp.exe") or (
        name in ("-m", "__main__.py") and as_module
    )


def import_tensorflow() -> None:
    """Imports TensorFlow; of what it writes meanwhile, the noise is left out."""
    if "tensorflow" in sys.modules:
        return
    level = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Read at its start.
    if level in ("0", "1"):
        return
    noise = _NOISE
    with tempfile.TemporaryFile() as written:
        stderr = os.dup(2)
        os.dup2(written.fileno(), 2)
        try:
            import tensorflow as tf

            if not any(map(os.path.exists, _DRIVER)):
                noise = *_NOISE, *_NO_GPU
                tf.config.list_physical_devices()  # It looks for a GPU once.
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            written.seek(0)
            for line in written:
                if line.strip() and not any(words in line for words in noise):
                    sys.stderr.write(line.decode(errors="replace"))
