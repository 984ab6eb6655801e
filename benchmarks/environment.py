"""What the figures of a benchmark depend on."""

import pathlib
import platform

import keras
import tensorflow as tf

import tfamp


def describe(command):
    """Returns versions and devices as a dict, for a benchmark's JSON file."""
    cpu = pathlib.Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return {
        "command": command,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "tfamp": tfamp.__version__,
        "cpu": names[0] if names else platform.processor(),
        "cores": len(names) or None,
        "gpus": [gpu.name for gpu in tf.config.list_physical_devices("GPU")],
    }
