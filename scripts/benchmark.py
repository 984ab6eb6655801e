"""Every precision mode beside float32, in one run, with a report for people.

python scripts/benchmark.py
python scripts/benchmark.py --workload=my_script:build
python scripts/benchmark.py --tasks=digits --config.repeats=5
python scripts/benchmark.py --config=configs/benchmark/gpu.py

Needs no download. An interrupted run resumes with the same command.
"""

import quiet_start  # Before all that imports TensorFlow.

from tfamp.commands import app, benchmark, command_flags

if __name__ == "__main__":
    command_flags.benchmark(f"{quiet_start.CONFIGS}/benchmark/quick.py")
    app.run(benchmark.run_flags)
