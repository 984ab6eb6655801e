"""What XLA is told on a host with an NVIDIA GPU, and what is left of it afterwards."""

import json
import os
import sys
import types

import helpers
import pytest
import tensorflow as tf
import workers

import tfamp

pytestmark = [
    pytest.mark.usefixtures("disabled"),
    pytest.mark.skipif(
        tf.__version__ >= "2.22", reason="which flags it knows was not tried"
    ),
]

NAMES = ("XLA_FLAGS", "TF_XLA_FLAGS")
TRITON = "--xla_gpu_enable_triton_gemm=false"
OWN = "--xla_dump_to=somewhere"  # A user's.
# By which XLA is asked to read its flags now.
SYMBOL = "tfamp.facts.names.symbol"


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """No flags of the machine that runs the tests."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "jax", raising=False)


@pytest.fixture
def gpu(monkeypatch):
    """TensorFlow sees an H100; XLA reads its flags when it first compiles something."""
    monkeypatch.setattr(SYMBOL, lambda name: None)
    details = {"device_name": "NVIDIA H100 80GB HBM3", "compute_capability": (9, 0)}
    device = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    here = tf.config.get_visible_devices

    def visible(kind=None):
        return [device] if kind == "GPU" else here(kind)

    monkeypatch.setattr(tf.config, "get_visible_devices", visible)
    monkeypatch.setattr(
        tf.config.experimental, "get_device_details", lambda device: details
    )


def flags():
    return os.environ.get("XLA_FLAGS")


def test_a_gpu_gets_flags_and_disable_takes_them_out(gpu):
    before = helpers.read_globals()
    for mode in ("float32", "mixed_bfloat16"):
        status = tfamp.enable(mode)
        assert TRITON in flags().split()
        assert flags() in status.xla and "in force" in status.xla
    tfamp.enable(xla_flags=False)
    assert flags() is None
    assert "flags: none (not requested)" in tfamp.status().xla
    tfamp.enable()
    tfamp.disable()
    assert helpers.find_leaks(before, helpers.read_globals()) == []
    assert TRITON not in tfamp.status().xla


def test_a_cpu_gets_none():
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("There is a GPU.")
    assert "no NVIDIA GPU" in tfamp.enable().xla
    assert flags() is None


@pytest.mark.parametrize(
    "given", [{"overrides": {"(": "float32"}}, {"mode": "mixed_float8"}], ids=str
)
def test_nothing_is_left_of_an_enable_that_fails(gpu, given):
    with pytest.raises(ValueError):
        tfamp.enable(**given)
    assert flags() is None


def test_flags_of_an_outer_enable_survive_a_failing_one(gpu):
    tfamp.enable()
    before = flags()
    with pytest.raises(TypeError, match="xla_flags='no'"):
        tfamp.enable(xla_flags="no")
    assert flags() == before


@pytest.mark.parametrize(
    ("later", "left"),
    [
        (lambda now: now, OWN),
        (lambda now: f"{now} --xla_later=1", f"{OWN} --xla_later=1"),
        (lambda now: f"--xla_later=1 {now}", f"--xla_later=1 {OWN}"),
        (lambda now: "--xla_later=1", "--xla_later=1"),
        (lambda now: "", ""),
        (lambda now: now.replace(OWN, ""), None),
        (lambda now: f"{TRITON}ly {now}", f"{TRITON}ly {OWN}"),
        (lambda now: None, None),
    ],
    ids=["untouched", "appended", "put before", "all", "emptied", "ours", "like", "no"],
)
def test_disable_leaves_what_the_user_set_before_and_since(gpu, later, left):
    os.environ["XLA_FLAGS"] = OWN
    tfamp.enable()
    assert flags().startswith(f"{OWN} --xla_gpu") and flags().endswith(TRITON)
    changed = later(os.environ.pop("XLA_FLAGS"))
    if changed is not None:
        os.environ["XLA_FLAGS"] = changed
    still = changed is not None and TRITON in changed.split()
    assert ("no longer in XLA_FLAGS" in tfamp.status().xla) != still
    tfamp.disable()
    assert flags() == left
    os.environ.pop("XLA_FLAGS", None)


@pytest.mark.parametrize("value", ["false", "true"])
def test_a_flag_that_the_user_set_stays(gpu, value):
    os.environ["XLA_FLAGS"] = own = f"--xla_gpu_enable_triton_gemm={value}"
    tfamp.enable()
    assert flags().split()[0] == own and flags().count("triton_gemm") == 1
    tfamp.disable()
    assert os.environ.pop("XLA_FLAGS") == own


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.setitem(sys.modules, "jax", types.ModuleType("jax")), "jax"),
        (lambda m: m.setattr(tf, "__version__", "2.99.0"), "TensorFlow 2.99"),
        (lambda m: m.setenv("XLA_FLAGS", "/some/file"), "names a file"),
    ],
    ids=["jax", "release", "file"],
)
def test_none_where_a_flag_could_end_the_process(gpu, monkeypatch, change, why):
    change(monkeypatch)
    before = flags()
    assert why in tfamp.enable().xla
    assert flags() == before


@pytest.fixture
def read(gpu, monkeypatch):
    """What XLA is asked to read, where it can be asked to read its flags now."""
    texts = []
    note = lambda again: texts.append((os.environ.get("XLA_FLAGS"), again))  # noqa: E731
    monkeypatch.setattr(SYMBOL, lambda name: note)
    return texts


@pytest.mark.parametrize("own", [None, OWN])
@pytest.mark.parametrize("jax", [False, True], ids=["", "jax"])
def test_xla_reads_them_at_once_and_the_variable_stays(read, monkeypatch, own, jax):
    """`import tensorflow` imports JAX where it is installed, as on Colab and Kaggle."""
    if jax:
        monkeypatch.setitem(sys.modules, "jax", types.ModuleType("jax"))
    if own:
        monkeypatch.setenv("XLA_FLAGS", own)
    for mode in ("float32", "mixed_bfloat16"):
        status = tfamp.enable(mode)
        assert f"{TRITON} (in force)" in status.xla and flags() == own
    with monkeypatch.context() as later:
        later.setenv("XLA_FLAGS", "--xla_later=1")
        assert "since enable() is not read" in tfamp.status().xla
    tfamp.disable()
    (given, again), *rest = read
    assert again and given.split()[-1] == TRITON
    assert given.startswith(own or "--xla_gpu")
    # XLA's own defaults again.
    assert [text for text, _ in rest] == [
        " ".join(given.split()[bool(own) :]).replace("=false", "=true")
    ]
    assert flags() == own


# ---- The folder of programs, in processes that begin ----

_GPU = """
import ctypes, json, os
import tensorflow as tf

class Driver:  # NVIDIA's, with one GPU.
    def __init__(self, name): self.name = name
    def cuInit(self, flags): return 0
    def cuDeviceGetCount(self, count): count._obj.value = 1
    def cuDeviceGet(self, device, number): device._obj.value = number
    def cuDeviceGetName(self, name, size, device): name.value = b"NVIDIA H100"
    def cuDeviceGetAttribute(self, value, what, device):
        value._obj.value = {75: 9, 76: 0}[what]
    def nvmlInit_v2(self): return 0
    def nvmlSystemGetDriverVersion(self, text, size): text.value = DRIVER
    def nvmlShutdown(self): return 0

DRIVER = os.environ.get("DRIVER", "580.95").encode()
load = ctypes.CDLL
fakes = ("libcuda.so.1", "libnvidia-ml.so.1")
ctypes.CDLL = lambda n, *a, **k: Driver(n) if n in fakes else load(n, *a, **k)
info = {"is_cuda_build": True}
tf.sysconfig.get_build_info = lambda: info
import tfamp
environ = dict(os.environ)
def folder(status): return status.xla.partition("programs on disk: ")[2]
"""
_FOLDERS = """
first = folder(tfamp.enable("float32"))
again = folder(tfamp.enable("mixed_bfloat16"))
tfamp.disable()
assert dict(os.environ) == environ
assert folder(tfamp.status()) == first  # TensorFlow has read it.
print("RESULT", json.dumps([first, again, os.path.isdir(first)]))
"""
_LATE = """
tf.config.list_physical_devices()
print("RESULT", json.dumps(folder(tfamp.enable("float32"))))
"""


def run(code, tmp_path, **environ):
    here = {**dict.fromkeys(NAMES), "XDG_CACHE_HOME": str(tmp_path), **environ}
    done = workers.run_python("-c", _GPU + code, **here)
    return json.loads(done.stdout.partition("RESULT")[2]), done.stderr


@pytest.mark.training
def test_programs_are_kept_apart_by_what_they_depend_on(tmp_path):
    found = []
    for environ in ({}, {}, {"DRIVER": "590.1"}, {"XLA_FLAGS": OWN}):
        (first, again, kept), _ = run(_FOLDERS, tmp_path, **environ)
        assert first == again and kept
        assert first.startswith(str(tmp_path))
        found.append(first)
    assert found[0] == found[1]
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({}, "call enable() first"),
        (
            {"TF_XLA_FLAGS": "--tf_xla_persistent_cache_directory=own"},
            "TF_XLA_FLAGS has its own",
        ),
    ],
    ids=["devices were listed", "the user has a folder"],
)
def test_status_says_why_programs_are_not_kept(tmp_path, environ, why):
    assert why in run(_LATE, tmp_path, **environ)[0]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    file = tmp_path / "file"
    file.touch()
    (first, _, kept), stderr = run(_FOLDERS, file)
    assert first.startswith("none (") and "Not a directory" in first and not kept
    assert stderr.count("What XLA compiles is not kept") == 1
