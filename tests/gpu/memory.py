"""Prints what `memory` computes beside the allocator's peak, as JSON; on the stand-in.

    python tests/gpu/stand_in.py tests/gpu/memory.py cnn/digits 512 mixed_bfloat16 xla

Without "xla" the step is a graph. Of a recipe on batches that are made for it.
"""

import json
import pathlib
import sys

from tfamp.measuring import workloads
from tfamp.measuring.benchmark import cell_modes
from tfamp.measuring.device import peaks

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def main(recipe, size, mode, *xla):
    config = cell_modes.with_mode(workloads.load(CONFIGS / f"{recipe}.py"), mode, 0)
    config.batch_size, config.jit_compile = int(size), bool(xla)
    found = peaks.measure(config.to_dict(), {})
    return {**found, "ratio": found["computed"]["total"] / found["later_bytes"]}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
