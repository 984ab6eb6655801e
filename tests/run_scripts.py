"""Runs scripts, each in a process of its own forked after TensorFlow's import.

Importing takes longer than most of what the tests do with a script. Reads a JSON list
of {"script", "arguments", "cwd"} from standard input; writes a list of {"returncode",
"stdout", "stderr"}. TensorFlow is imported but not started, so forking is safe.
"""

import json
import os
import pathlib
import runpy
import sys
import tempfile
import traceback

import tfamp.training.app  # noqa: F401


def run(case):
    """Returns what became of one script."""
    with tempfile.TemporaryDirectory() as folder:
        files = [pathlib.Path(folder, name) for name in ("stdout", "stderr")]
        child = os.fork()
        if child == 0:
            _become(case, files)
        _, status = os.waitpid(child, 0)
        stdout, stderr = (file.read_text() for file in files)
    code = os.waitstatus_to_exitcode(status)
    return {"returncode": code, "stdout": stdout, "stderr": stderr}


def _become(case, files):
    """Runs the script and ends this process as a plain `python script` would."""
    code = 1
    try:
        for number, file in zip((1, 2), files, strict=True):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
        os.chdir(case["cwd"])
        sys.argv = [case["script"], *case["arguments"]]
        sys.path.insert(0, os.path.dirname(case["script"]))
        runpy.run_path(case["script"], run_name="__main__")
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    json.dump([run(case) for case in json.load(sys.stdin)], sys.stdout)
