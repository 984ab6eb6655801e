"""`rehearse`: what a mode would do on another device, before that is rented."""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
from ml_collections import config_dict

from tfamp import checks, errors, progress, tables
from tfamp.diagnostics import audit
from tfamp.facts import hardware
from tfamp.facts import modes as precision_modes
from tfamp.measuring import process_memory, processes, training_steps, workloads
from tfamp.numerics import compare, search
from tfamp.runs import plots
from tfamp.storage import step_memory

MEASURED, EMULATED, COMPUTED = "measured", "emulated", "computed"
_MODES = ("mixed_bfloat16", "mixed_float16", "float8")
_WORST, _SEED = 3, 0
_ABOVE = {
    **{"loc": "lower center", "bbox_to_anchor": (0.5, 1)},
    **{"ncols": 3, "fontsize": "small"},
}


class Rehearsal(NamedTuple):
    """How a model behaves in several modes, and how a device supports them; `print` it.

    Attributes:
      name: Name of the configuration or function.
      device: The device's name.
      batch_size: Examples in a batch.
      steps: Training steps that were taken in each mode.
      modes: A dict for each mode, float32 first: mode; format (the one that decides its
        speed); fast (whether the device has it in hardware) and why; how ("measured" if
        this host computes in that format natively, else "emulated"); losses of the
        steps; skipped_steps; output_error (of the model, against float32) and worst
        (paths of the layers that make the largest errors themselves); overrides (that
        `search_precision` found); memory (bytes of a step by kind); formats (share of
        the multiplications by format); fast_share; failures ({part: message}).
      notes: Lines on how the figures came about.
    """

    name: str
    device: str
    batch_size: int
    steps: int
    modes: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return {"schema_version": 1, **self._asdict()}

    def to_markdown(self) -> str:
        """Returns a page: the table, what to paste, and the notes."""
        table = tables.of_dicts([self._row(each) for each in self.modes])
        advice = (text for each in self.modes for text in self._advice(each))
        notes = (f"- {text}" for text in (*advice, *self.notes))
        title = f"# {self.name} rehearsed for {self.device}"
        return "\n".join([title, "", table, "", *notes])

    __str__ = to_markdown

    def _row(self, each):
        def cell(key, text, how):
            value = each.get(key)
            return "-" if value is None else f"{text(value)} ({how})"

        how = each["how"]
        size = cell("memory", lambda x: process_memory.mib(sum(x.values())), COMPUTED)
        return {
            "mode": each["mode"],
            f"loss after {self.steps} steps": cell(
                "losses", lambda x: f"{x[-1]:.4g}", how
            ),
            "skipped": cell("skipped_steps", str, how),
            "error of outputs": cell("output_error", tables.number, how),
            "layers to keep": cell("overrides", lambda x: str(len(x)), how),
            "memory of a step": size,
            "native multiplications": cell("fast_share", "{:.0%}".format, COMPUTED),
        }

    def _advice(self, each):
        for part, message in each["failures"].items():
            yield f"{each['mode']}: {part} failed: {message}"
        if each is self.modes[0]:
            return
        if each["format"] not in each.get("formats", each["format"]):
            yield f"{each['mode']}: no layer computes in {each['format']}."
        yield f"{each['mode']}: {each['format']} there: {each['reason']}."
        if each.get("worst"):
            yield f"{each['mode']}: largest errors in {', '.join(each['worst'])}."
        if (overrides := each.get("overrides")) is not None:
            more = f", overrides={overrides!r}" if overrides else ""
            yield f"{each['mode']}: `tfamp.enable({each['mode']!r}{more})`"

    def figure(self) -> Any:
        """Returns a matplotlib figure: losses, errors, memory and shares of formats."""
        figure = plots.empty_figure(f"{self.name} for {self.device}", (11, 7))
        losses, errors_, memory, shares = figure.subplots(2, 2).flat
        names = [each["mode"] for each in self.modes]
        for each, line in zip(self.modes, plots.STYLES, strict=False):
            label = f"{each['mode']} ({each['how']})"
            losses.plot(each.get("losses") or [], linestyle=line, label=label)
        losses.set(xlabel="step", ylabel="loss")
        losses.legend(**_ABOVE)
        output_errors = [each.get("output_error") or 0.0 for each in self.modes]
        drawn = errors_.barh(names, output_errors, color="gray")
        errors_.bar_label(drawn, [tables.number(x) for x in output_errors], padding=3)
        errors_.set_xlabel("error of outputs against float32")
        errors_.locator_params(axis="x", nbins=5)
        _stack(memory, names, [x.get("memory") or {} for x in self.modes], 2**20)
        memory.set_xlabel(f"MiB of a step ({COMPUTED})")
        _stack(shares, names, [x.get("formats") or {} for x in self.modes], 0.01)
        shares.set_xlabel(f"% of the multiplications by format ({COMPUTED})")
        for axes in (errors_, memory, shares):
            axes.invert_yaxis()
            axes.margins(x=0.25)
        return figure


def _stack(axes, names, parts, unit):
    """Draws bars of several parts; the parts have the same gray in each."""
    kinds = dict.fromkeys(kind for each in parts for kind in each)
    left = [0.0] * len(names)
    for number, kind in enumerate(kinds):
        widths = [each.get(kind, 0) / unit for each in parts]
        gray = f"{0.25 + 0.65 * number / max(1, len(kinds) - 1):.2f}"
        axes.barh(names, widths, left=left, color=gray, edgecolor="black", label=kind)
        left = [x + y for x, y in zip(left, widths, strict=True)]
    axes.legend(**_ABOVE)


def rehearse(
    workload: str | Callable[..., Any] | config_dict.ConfigDict,
    batch_size: int | None = None,
    *,
    device: str | hardware.DeviceDescription = "h100",
    modes: str | Sequence[str] = _MODES,
    steps: int = 20,
    seconds: float = 60.0,
    workdir: str | os.PathLike | None = None,
    verbose: int = 1,
) -> Rehearsal:
    """Tries modes for another device here: do they run, are they right, do they fit.

    Each mode trains some steps in its own process, with the plan that `enable` would
    have on that device. What this host does not compute natively is emulated: its
    numbers are those of the format, its time is not, so that no times are reported.
    Then `compare_precision`, `search_precision`, `memory` and `audit` look at the
    trained model.

    Args:
      workload: As of `find_batch_size`: a function with an argument `batch_size` that
        returns a compiled model and a dataset of batches, or its name; or a
        configuration.
      batch_size: Examples in a batch; None: the configuration's.
      device: A key of the table of devices, such as "h100", or a `DeviceDescription`.
      modes: Modes to try beside float32, or one.
      steps: Training steps in each mode.
      seconds: Time of `search_precision` in each mode.
      workdir: Folder for what the modes showed, which a second call on the same machine
        with as many steps does not repeat. None: nothing is kept.
      verbose: 1: a line on each mode, on standard error, and the minutes left; 0: none.

    Returns:
      A `Rehearsal`; `print` shows its page.

    Raises:
      RunError: If the model and its batches cannot be made in float32, or if the folder
        cannot be written or holds anything but trials of this workload.
      ValueError: If a setting makes no sense, or there is no such function or device.

    Example:
      print(tfamp.rehearse("my_script:build", 32, device="h100"))
    """
    target = hardware.find_device(device)
    checks.check_count("steps", steps)
    checks.check_real("seconds", seconds)
    tried = "float32", *([modes] if isinstance(modes, str) else modes)
    names = dict.fromkeys(precision_modes.get_mode(x).name for x in tried)
    workload = workloads.named(workload)
    size = workloads.batch_size_of(workload, batch_size)
    rows = []
    with (
        progress.Progress(verbose) as lines,
        training_steps.opened(workload, steps, workdir, lines) as trials,
    ):
        lines.total = len(names)
        for mode in names:
            arguments = trials.workload, mode, size, steps, seconds, target
            done = _take(trials.saved_trials, lines, arguments, bool(rows))
            rows.append({**_support(mode, target), **done.value})
            lines.result(_result(rows[-1]))
    notes = (
        f"{MEASURED}: computed in that format by this host; {EMULATED}: the numbers of "
        f"the format, by other hardware; {COMPUTED}: from a trace and the device's "
        "table. Times are not predicted.",
        f"memory of a step: by `tfamp.memory` for {size} examples; a device's programs "
        "and libraries come on top.",
    )
    name = trials.workload.name
    return Rehearsal(name, target.label, size, steps, tuple(rows), notes)


def _support(mode, device):
    """Returns the fields of a mode that need no model."""
    fastest = precision_modes.get_mode(mode).fastest_format
    here = hardware.format_support(fastest, hardware.read_devices())
    there = hardware.describe_support(device)[fastest]
    return {
        **{"mode": mode, "format": fastest, "fast": there.fast},
        "reason": there.reason,
        "how": MEASURED if here.fast or fastest == "float32" else EMULATED,
    }


def _result(row):
    """Returns what the line on a mode says came of it."""
    failed, losses = ", ".join(row["failures"]), row.get("losses")
    loss = f"loss {losses[-1]:.4g} after {len(losses)} steps" if losses else ""
    return "; ".join(filter(None, [loss, failed and f"{failed} failed"]))


def _take(saved_trials, lines, arguments, optional):
    """Returns an `Outcome` with the other fields; float32 must not fail."""
    _, mode, size, _, seconds, device = arguments
    done = saved_trials.take(
        f"rehearse-{mode}-batch{size}",
        lambda: processes.call(
            _rehearse, *arguments, timeout=processes.TIME_LIMIT + seconds
        ),
        lines,
        mode,
        usable=lambda row: not row["failures"],  # What failed is tried again.
        rehearsed=[device.label, f"{device.compute_capability}", seconds],
    )
    if done.failure and not (optional or done.lack):
        raise errors.RunError(f"float32 cannot be tried. Received: {done.failure}")
    return done._replace(value=done.value or {"failures": {"training": done.failure}})


def _rehearse(workload, mode, size, steps, seconds, device):
    """Returns the fields of a mode that need its model, in a process of its own."""
    variant = training_steps.variant(workload, {"mode": mode}, size)
    row: dict[str, Any] = {"failures": {}}
    keras.utils.set_random_seed(_SEED)  # The same weights in each mode.
    built = training_steps.built(variant, 4 * steps)
    with hardware.simulated(device), built as setup:
        batches = [*setup.batches.take(4)]
        pairs = [keras.utils.unpack_x_y_sample_weight(each)[:2] for each in batches]
        model = setup.model
        parts = {
            "training": lambda: _train(setup, steps),
            "memory": lambda: _hold(model, batches[0]),
            "the audit": lambda: _multiply(model, pairs[0][0], device),
        }
        if mode != "float32":
            parts["the comparison"] = lambda: _compare(model, *pairs[0], mode)
            parts["the search"] = lambda: _search(model, pairs, mode, seconds)
        for name, part in parts.items():
            try:
                row.update(part())
            except Exception as error:  # Code of the user's model may raise anything.
                words = f"{type(error).__name__}: {error}"
                row["failures"][name] = words.partition("\n")[0]
    return row


def _train(setup, steps):
    fit = {"epochs": steps, "steps_per_epoch": 1, "shuffle": False}
    history = setup.model.fit(setup.batches, **fit, verbose=0)
    return {
        "losses": [float(loss) for loss in history.history["loss"]],
        "skipped_steps": training_steps.scaling(setup.model, steps)["skipped_steps"],
    }


def _hold(model, batch):
    held = step_memory.memory(model, batch)
    return {"memory": {kind: getattr(held, kind) for kind in step_memory.KINDS}}


def _multiply(model, x, device):
    formats = audit.audit(model, inputs=x, device=device).formats
    support = hardware.describe_support(device)
    fast = sum(n for name, n in formats.items() if support[name].fast)
    return {"formats": formats, "fast_share": fast}


def _compare(model, x, y, mode):
    keywords = {} if y is None else {"targets": y}
    rows = compare.compare(model, x, mode, **keywords)[0].rows
    ordered = sorted(rows, key=lambda each: -each.local_error)
    return {
        "output_error": rows[-1].accumulated_error,
        "worst": [each.name for each in ordered[:_WORST]],
    }


def _search(model, pairs, mode, seconds):
    samples, loss = pairs, model.loss
    if pairs[0][1] is None:
        samples, loss = [x for x, _ in pairs], None
    found = search.search_precision(
        *(model, samples, mode), seconds=seconds, loss=loss, verbose=0
    )
    return {"overrides": dict(found.overrides)}
