"""Every precision mode beside float32, in one run, with a report for people.

python scripts/benchmark.py
python scripts/benchmark.py --workload=my_script:build
python scripts/benchmark.py --tasks=digits --config.repeats=5
python scripts/benchmark.py --config=configs/benchmark/gpu.py

Needs no download. An interrupted run resumes with the same command.
"""

import quiet_start  # Before all that imports TensorFlow.

from tfamp.commands import benchmark

if __name__ == "__main__":
    benchmark.define_flags(f"{quiet_start.CONFIGS}/benchmark/quick.py")
    benchmark.run()
