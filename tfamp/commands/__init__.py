"""The flags and jobs of `tfamp train`, `benchmark` and `doctor`, and of `scripts/`.

The way of `tfamp train cnn/digits`:

1. `tfamp.__main__` finds the command.
2. `command_flags` defines its flags, `app` parses them and the configuration, and
   imports TensorFlow.
3. `train` runs the job: `compare` by default, so each mode is trained, float32 too.
4. `jobs` opens the folder; `runs/compare` makes the list of runs.
5. `runs/trainer` trains each one by Keras' `fit`, resumed where it was stopped.
"""
