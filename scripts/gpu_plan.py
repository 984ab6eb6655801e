"""Measures what a GPU should show first, in twelve minutes, and writes one page.

    python scripts/gpu_plan.py
    python scripts/gpu_plan.py --parts=time,numerics --minutes=6
    python scripts/gpu_plan.py --tiny

The same as `tfamp gpu-report`: steps of BERT-Base and ResNet-50 beside stock Keras' and
PyTorch's, where their time goes, errors of layers beside float64, memory beside
`tfamp.memory`, tests, accuracy, float8, the graph rewrite, and `fit_memory`. The same
command measures what is missing. `--tiny` runs small models on any device: its figures
say nothing of a GPU.
"""

import quiet_start  # noqa: F401  Before all that imports TensorFlow.

from tfamp.commands import app, command_flags, gpu_report

if __name__ == "__main__":
    command_flags.gpu_report()
    app.run(gpu_report.run_flags)
