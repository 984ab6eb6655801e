"""Imports TensorFlow without the lines that it writes at each start.

Set `TF_CPP_MIN_LOG_LEVEL=0` to see all; `tfamp/quiet.py` says what is left out.
"""

import pathlib
import runpy

ROOT = pathlib.Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
# By its path: importing tfamp imports TensorFlow.
runpy.run_path(str(ROOT / "tfamp/quiet.py"))["import_tensorflow"]()
