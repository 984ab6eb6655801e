"""What needs no checkout: `python -m tfamp doctor`, `status` or `benchmark`.

    python -m tfamp status
    python -m tfamp doctor --simulate=a100
    python -m tfamp benchmark --workload=my_script:build

`status` calls `tfamp.enable()` and prints what it says; the other two are
scripts/doctor.py and scripts/benchmark.py, with their flags (`--help`).
"""

import sys

import tfamp


def main() -> None:
    """Runs the command that is named first."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name == "status":
        print(tfamp.enable())
    elif name in ("doctor", "benchmark"):
        sys.argv[:2] = [f"-m tfamp {name}"]
        _run_script(name)
    elif name in ("-h", "--help"):
        print(__doc__)
    else:
        sys.exit(f"Unknown command. Received: {name!r}.\n\n{__doc__}")


def _run_script(name):
    from tfamp.benchmark import app, cells  # Of the extras.
    from tfamp.training import doctor

    if name == "doctor":
        doctor.define_flags()
        doctor.run()
    else:
        app.define_flags(cells.__file__)  # No task but the user's own.
        app.run()


if __name__ == "__main__":
    main()
