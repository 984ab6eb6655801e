"""What the plan for a GPU measures: groups whose steps are timed, and other jobs."""

import functools
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tfamp.measuring import device, processes, workloads
from tfamp.measuring.benchmark import accuracy, cell_modes
from tfamp.measuring.device import (
    features,
    networks,
    numerics,
    outside,
    peaks,
    steps,
)
from tfamp.runs import base_config

ROUNDS, COUNT = 3, 6  # Rounds of each variant, and steps of a round.
_CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
_CHECKOUT = pathlib.Path(__file__).parents[3]
_SMALL = 40 * 2**30  # Bytes: BERT-Base in stock Keras takes 21 GiB with batches of 32.
# Bytes of a process whose steps are timed, in the mean; 6 to 19 GiB on an H200.
HELD = 12 * 2**30
_RECIPES = {
    "bert/docstrings": 64,
    "lm/docstrings": 64,
    "cnn/cifar10_resnet": 512,
    "cnn/digits": 512,
    "unet/digits_on_photographs": 64,
    "tabular/bike_sharing": 512,
}
# What of the optimizer and of low bits failed once on a GPU; then what any device has.
_TESTS = {
    "low bits": (
        "tests/contract/test_low_bit.py",
        "tests/rules/test_codes.py",
        "tests/rules/test_update.py",
    ),
    "loss scaling": ("tests/contract/test_optimizer_properties.py",),
    "device": ("tests", "-m", "device or requires_gpu"),
}


class Asked(NamedTuple):
    """What a call of the plan is asked for.

    Attributes:
      parts: Of `PARTS`.
      minutes: Of all.
      tiny: Whether models are small, as a check.
      torch_python: Command of an interpreter with PyTorch; "": this one.
      modes: Of the device, TF32 or float32 first.
      memory: Of the GPU, in bytes; None without.
    """

    parts: tuple[str, ...]
    minutes: float = 12.0
    tiny: bool = False
    torch_python: str = ""
    modes: tuple[str, ...] = ("float32",)
    memory: int | None = None

    @property
    def together(self) -> int | None:
        """How many processes whose steps are timed the GPU has room for."""
        return self.memory and max(1, self.memory // HELD)

    @property
    def sizes(self) -> networks.Sizes:
        """Sizes of the models that are timed, which the memory has room for."""
        if self.tiny:
            return networks.TINY
        small = self.memory is not None and self.memory < _SMALL
        return networks.Sizes(batch=8, images=32) if small else networks.Sizes()

    @property
    def mixed(self) -> tuple[str, ...]:
        """The mixed modes of the device."""
        return tuple(mode for mode in self.modes if mode.startswith("mixed"))


class Variant(NamedTuple):
    """A process whose steps are timed.

    Attributes:
      side: "tfamp", "keras" for stock Keras, or "torch".
      mode: A precision mode.
      compiled: Whether by XLA, or by `torch.compile`.
    """

    side: str
    mode: str
    compiled: bool


class Group(NamedTuple):
    """Variants of one model that are timed in turns; the first is the base of ratios.

    Attributes:
      part: Of `PARTS`.
      model: Of `networks.NAMES`.
      name: Of the group.
      variants: Its processes.
      limit: Seconds.
    """

    part: str
    model: str
    name: str
    variants: tuple[Variant, ...]
    limit: float


class Job(NamedTuple):
    """What a process measures beside others.

    Attributes:
      part: Of `PARTS`.
      name: Of the job.
      limit: Seconds.
      start: Function that starts it; the result is as `processes.Process`.
    """

    part: str
    name: str
    limit: float
    start: Callable[[], Any]


def start(group: Group, variant: Variant, options: Asked) -> Any:
    """Starts the process of a variant.

    Args:
      group, variant, options: What it is of.
    """
    sizes = options.sizes
    if variant.side == "torch":
        how = "compiled" if variant.compiled else "eager"
        numbers = json.dumps(sizes._asdict()), str(ROUNDS), str(COUNT)
        return outside.TorchSteps(
            options.torch_python, (group.model, variant.mode, how, *numbers)
        )
    return processes.Process(
        *(steps.steps, group.model, *variant, sizes, ROUNDS, COUNT),
        preload=(steps.__name__,),
    )


# ---- Parts ----


def _time(options) -> Iterator[Group]:
    """Steps without XLA: ours, PyTorch's and stock Keras', beside Keras' default."""
    base, *others = _variants(options, False)
    stock = [Variant("keras", mode, False) for mode in options.mixed]
    for model in networks.NAMES:
        yield Group("time", model, "eager", (base, *others, *stock), 300)


def _compiled(options) -> Iterator[Group]:
    """Steps that XLA or `torch.compile` compiles, beside the same base."""
    for model in networks.NAMES:
        yield Group("compiled", model, "xla", (*_variants(options, True),), 300)


def _variants(options, compiled):
    """The base, and most wanted first ours and PyTorch's."""
    plain, mixed = options.modes[0], options.mixed[:1]
    yield Variant("keras", plain, False)
    for mode in (*mixed, plain):
        yield Variant("tfamp", mode, compiled)
        yield Variant("torch", mode, compiled)
    for mode in options.mixed[1:]:
        yield Variant("tfamp", mode, compiled)


def _stock_xla(options) -> Iterator[Group]:
    """Keras' default on a GPU, which may compile for many minutes."""
    for mode in (*options.mixed[:1], options.modes[0]):
        variants = (Variant("keras", mode, True),)
        yield Group("stock_xla", "bert_base", f"keras_{mode}", variants, 200)


def _numerics(options) -> Iterator[Job]:
    for name in numerics.cases(options.tiny):
        label = name.replace(" ", "_")
        yield _job("numerics", label, 120, numerics.check, name, options.tiny)
    yield _job("numerics", "codes", 120, numerics.check_codes)


def _memory(options) -> Iterator[Job]:
    plain, mixed = options.modes[0], (*options.mixed, *options.modes)[0]
    for recipe in _RECIPES:
        for mode in dict.fromkeys((mixed, plain)):
            for xla in (False, True):
                yield _peak(options, recipe, mode, xla)
    # Slots and blocks, and what cuDNN takes where it may not, and where it cannot try.
    blocks = {"remat": ["transformer_layer_.*"]}
    for xla in (False, True):
        yield _peak(options, "bert/docstrings", mixed, xla, "remat", blocks)
        for bits in ("8bit", "bfloat16"):
            slots = {"optimizer_state": bits}
            yield _peak(options, "lm/docstrings", mixed, xla, f"slots_{bits}", slots)
    for what, name, value in (
        ("no_workspace", "TF_CUDNN_WORKSPACE_LIMIT_IN_MB", "0"),
        ("no_autotuning", "TF_CUDNN_USE_AUTOTUNE", "0"),
    ):
        for recipe in ("cnn/cifar10_resnet", "unet/digits_on_photographs"):
            yield _peak(options, recipe, plain, False, what, {}, {name: value})


def _peak(options, recipe, mode, xla, what="", keywords=None, environment=None):
    one = _config(options, recipe, mode, 0)
    one.jit_compile = xla
    if not options.tiny:
        one.batch_size = _RECIPES[recipe]
    with one.unlocked():
        one.precision.update(keywords or {})
    words = recipe.replace("/", "."), mode, "xla" if xla else "plain", what
    name = "-".join(filter(None, words))
    return _job("memory", name, 150, peaks.measure, one.to_dict(), environment or {})


def _tests(options) -> Iterator[Job]:
    """Those of the checkout; an installed package has none."""
    checkout = (_CHECKOUT / "tests/contract").is_dir()
    workers = str(min(4, processes.cores() // 4))
    for name, arguments in _TESTS.items() if checkout else ():
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-n", workers, "--tb=short"),
            *("-p", "no:cacheprovider", "-p", "no:benchmark", "-rfE"),
            *("--continue-on-collection-errors", *arguments),
            *(["--collect-only", "-q"] * options.tiny),
        ]
        start = functools.partial(outside.Command, command, _CHECKOUT)
        yield Job("tests", name, 300, start)


def _accuracy(options) -> Iterator[Job]:
    """Five seeds in each mode: digits, and sentences where their data are."""
    data = {"cnn/digits": ""}
    if shared := os.environ.get("TFAMP_SHARED_DATA"):
        data["bert/sentences"] = os.path.join(shared, "uci_sentences")
    for seed in range(1 if options.tiny else 5):
        for recipe, folder in data.items():
            for mode in options.modes:
                one = _config(options, recipe, mode, seed)
                one.data_dir = folder
                name = f"{recipe.replace('/', '.')}-{mode}-seed{seed}"
                yield _job("accuracy", name, 240, _train, one.to_dict())


def _train(plain):
    with tempfile.TemporaryDirectory() as folder:
        return accuracy.train(plain, folder)


def _float8(options) -> Iterator[Job]:
    for mode in ("float8", "mixed_bfloat16"):
        arguments = mode, {}, True, options.tiny
        yield _job("float8", f"dense-{mode}", 120, features.train, *arguments)


def _rewrite(options) -> Iterator[Job]:
    for mode, rewrite in map(
        cell_modes.VARIANTS.get, cell_modes.default_modes(slow=True)
    ):
        if rewrite is not None:
            arguments = mode, {"graph_rewrite": True}, False, options.tiny
            yield _job("rewrite", f"dense-{mode}", 120, features.train, *arguments)


def _fit_memory(options) -> Iterator[Job]:
    """A limit that float32 does not fit into."""
    one = _config(options, "bert/docstrings", options.modes[0], 0)
    size, limit = (8, "2GiB") if options.tiny else (256, "600MiB")
    code = (
        "import sys, json, tfamp; from ml_collections import config_dict; "
        "config = config_dict.ConfigDict(json.loads(sys.argv[1])); "
        f"print(tfamp.fit_memory(config, {limit!r}, batch_size={size}))"
    )
    command = [sys.executable, "-c", code, json.dumps(one.to_dict())]
    yield Job("fit_memory", "bert", 240, lambda: outside.Command(command, _CHECKOUT))


# Part -> function of the options. The jobs of two parts run while the processes of
# "compiled" begin, which takes minutes.
PARTS: dict[str, Callable[[Asked], Iterator[Any]]] = dict(
    zip(
        device.PARTS,
        (
            *(_time, _numerics, _memory, _compiled, _tests, _accuracy, _float8),
            *(_rewrite, _fit_memory, _stock_xla),
        ),
        strict=True,
    )
)


def _config(options, recipe, mode, seed):
    config = workloads.load(_CONFIGS / f"{recipe}.py")
    return cell_modes.with_mode(
        base_config.apply_tiny(config) if options.tiny else config, mode, seed
    )


def _job(part, name, limit, function, *arguments):
    modules = steps, numerics, peaks, accuracy
    preload = (*(module.__name__ for module in modules), "keras_hub")
    start = functools.partial(processes.Process, function, *arguments, preload=preload)
    return Job(part, name, limit, start)
