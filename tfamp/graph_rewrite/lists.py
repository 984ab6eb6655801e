"""The operation lists of TensorFlow's graph rewrite: read, changed and checked.

TensorFlow paints operations by four lists. It never checks a change of them: an
unknown name does nothing, and a name on two lists ends the whole rewrite silently.
"""

import difflib
import functools
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.framework import op_def_registry  # TensorFlow 2.21

PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"
LISTS = ("allowlist", "inferlist", "denylist", "clearlist")
# Older names that TensorFlow 2.21 still reads, after the newer ones.
ALIASES = {"allowlist": "WHITELIST", "inferlist": "GRAYLIST", "denylist": "BLACKLIST"}
CONVERTING = ("allowlist", "inferlist", "clearlist")
HEADER = "tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h"

Lists = Mapping[str, frozenset[str]]


class InstalledLists(NamedTuple):
    """TensorFlow's own lists.

    Attributes:
      modes: Dict from "bfloat16" (CPU), "float16" (CUDA) and "float16_cpu" to a dict
        from list name to operations; None if they cannot be read.
      reason: Why they cannot be read, else "".
    """

    modes: Mapping[str, Lists] | None
    reason: str


class Change(NamedTuple):
    """One addition to, or removal from, a list.

    Attributes:
      list: One of `LISTS`.
      add: Whether operations are added; else they are removed.
      ops: Names of operations.
      source: Who asks: an argument's or an environment variable's name.
    """

    list: str
    add: bool
    ops: tuple[str, ...]
    source: str


class MergedLists(NamedTuple):
    """What all changes come to.

    Attributes:
      environ: Environment variable to value, None to unset it; aliases included.
      problems: One line for each thing that must be put right.
      notes: One line for each thing that has no effect.
    """

    environ: dict[str, str | None]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def split_names(value: str | Iterable[str]) -> tuple[str, ...]:
    """Returns the names in a comma list or an iterable, without blanks or repeats."""
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))


def variable_names() -> tuple[str, ...]:
    """Returns every environment variable that changes a list."""
    words = [*map(str.upper, LISTS), *ALIASES.values()]
    return tuple(f"{PREFIX}{word}_{end}" for word in words for end in ("ADD", "REMOVE"))


# ---- TensorFlow's own lists ----


@functools.cache
def installed() -> InstalledLists:
    """Reads the lists from the installed TensorFlow's headers."""
    path = pathlib.Path(tf.sysconfig.get_include(), HEADER)
    try:
        return InstalledLists(parse_header(path.read_text()), "")
    except (OSError, ValueError) as error:
        reason = f"TensorFlow's operation lists could not be read ({error})"
        return InstalledLists(None, reason)


def parse_header(text: str) -> dict[str, Lists]:
    """Returns mode -> list -> operations, from auto_mixed_precision_lists.h.

    CUDA's lists are those for CUDA 9.1 and cuDNN 8 or later, as TensorFlow 2.21 is
    built with.

    Raises:
      ValueError: If the header is not built as expected.
    """
    text = re.sub(r"//[^\n]*", "", text)
    # Of the two openings of one block, the one for CUDA.
    text = re.sub(r"#if TENSORFLOW_USE_ROCM.*?#else", "", text, flags=re.DOTALL)
    parts = re.split(r"\nclass AutoMixedPrecisionLists(\w*)[^;{]*\{", text)
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))
    if not {"", "Fp16", "Mkl"} <= bodies.keys():
        raise ValueError(f"expected three classes, found {sorted(bodies)}")
    shared = _strings(bodies[""].partition("tensor_list_ops[]")[2])
    modes = {
        "bfloat16": ("Mkl", set()),
        "float16": ("Fp16", {"use_cuda_"}),
        "float16_cpu": ("Fp16", {"use_onednn_"}),
    }
    return {
        mode: {name: _read_list(bodies[key], name, on, shared) for name in LISTS}
        for mode, (key, on) in modes.items()
    }


def _strings(text):
    return frozenset(re.findall(r'"(\w+)"', text))


def _read_list(body, name, switches_on, shared):
    method = name.removesuffix("list").capitalize() + "List() override"
    found = re.search(
        re.escape(method) + r".*?auto list = [^{]*\{([^}]*)\};(.*?)UpdateList\(",
        body,
        re.DOTALL,
    )
    if found is None:
        raise ValueError(f"found no {method}")
    ops, inserts = _strings(found[1]), found[2]
    for condition, block in re.findall(
        r"if \(([^{]*)\)\s*(?:#endif)?\s*\{([^}]*)\}", inserts
    ):
        if any(switch in condition for switch in switches_on):
            ops |= _strings(block)
    return ops | shared if "AddTensorListOps(&list)" in inserts else ops


# ---- Changes ----


def changes_of_environment(environ: Mapping[str, str]) -> list[Change]:
    """Returns the changes that environment variables ask for, in TensorFlow's order."""
    found = []
    for name in LISTS:
        for word in (name.upper(), ALIASES.get(name)):
            for end in ("ADD", "REMOVE"):
                variable = f"{PREFIX}{word}_{end}"
                ops = split_names(environ.get(variable, ""))
                if word and ops:
                    found.append(Change(name, end == "ADD", ops, variable))
    return found


def merge(
    base: Lists | None,
    changes: Sequence[Change],
    float32_ops: Sequence[str],
    is_known: Callable[[str], bool] | None = None,
) -> MergedLists:
    """Applies changes to TensorFlow's lists, and finds what is wrong with them.

    Args:
      base: TensorFlow's own lists; None if unknown: then no conflict is found.
      changes: In the order in which they apply.
      float32_ops: Operations to take off each list that would convert them.
      is_known: Whether an operation exists; default: TensorFlow's registry.

    Returns:
      A `MergedLists`.
    """
    known = is_known or is_operation
    own = {name: base[name] if base else frozenset() for name in LISTS}
    problems = _unknown(changes, float32_ops, set().union(*own.values()), known)
    problems += _contradictions(changes, float32_ops)
    final = {name: set(ops) for name, ops in own.items()}
    for change in changes:
        current = final[change.list]
        (current.update if change.add else current.difference_update)(change.ops)
    for name in CONVERTING:
        final[name] -= set(float32_ops)
    if base:
        problems += _conflicts(own, final)
        removed = {name: own[name] - final[name] for name in LISTS}
    else:
        removed = _blind_removals(changes, float32_ops, final)
    environ = dict.fromkeys(variable_names())
    for name in LISTS:
        for end, ops in (("ADD", final[name] - own[name]), ("REMOVE", removed[name])):
            environ[f"{PREFIX}{name.upper()}_{end}"] = ",".join(sorted(ops)) or None
    notes = _idle_removals(own, changes) if base else []
    return MergedLists(environ, tuple(problems), tuple(notes))


def is_operation(name: str) -> bool:
    """Whether TensorFlow has an operation of this name."""
    return op_def_registry.get(name) is not None


def _unknown(changes, float32_ops, listed, is_known):
    problems = []
    asked = [(change.source, change.ops) for change in changes]
    for source, ops in (*asked, ("float32_ops", float32_ops)):
        # Some operations on TensorFlow's own lists are in other builds only.
        bad = [op for op in ops if op not in listed and not is_known(op)]
        if bad:
            names = ", ".join(_with_suggestion(op, listed) for op in bad)
            problems.append(f"`{source}` names unknown operations: {names}.")
    return problems


def _with_suggestion(op, listed):
    names = [*listed, *(name for name in dir(tf.raw_ops) if name[0].isupper())]
    lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(op.lower(), lower, n=3)
    if not close:
        return f"{op!r}"
    return f"{op!r} (close: {', '.join(lower[name] for name in close)})"


def _contradictions(changes, float32_ops):
    return [
        f"`{change.source}` adds {', '.join(both)}, which `float32_ops` keeps in "
        f"float32. Leave {', '.join(both)} out of one of them."
        for change in changes
        if change.add and change.list in CONVERTING
        if (both := [op for op in change.ops if op in float32_ops])
    ]


def _conflicts(own, final):
    problems = []
    for op in sorted(set().union(*final.values())):
        lists = [name for name in LISTS if op in final[name]]
        if len(lists) < 2:
            continue
        old = [name for name in lists if op in own[name]]
        cure = (
            f"Add it to {' and '.join(f'`{name}_remove`' for name in old)}"
            if old
            else "Add it to one list only"
        )
        problems.append(
            f"{op!r} would be on {len(lists)} lists, {' and '.join(lists)}: TensorFlow "
            f"gives up the rewrite then. {cure}."
        )
    return problems


def _blind_removals(changes, float32_ops, final):
    removed = {name: set() for name in LISTS}
    for change in changes:
        if not change.add:
            removed[change.list].update(change.ops)
    for name in CONVERTING:
        removed[name].update(float32_ops)
    return {name: ops - final[name] for name, ops in removed.items()}


def _idle_removals(own, changes):
    notes = []
    for change in changes:
        added = {op for c in changes if c.add and c.list == change.list for op in c.ops}
        idle = [op for op in change.ops if op not in own[change.list] | added]
        if idle and not change.add:
            notes.append(
                f"`{change.source}` removes {', '.join(idle)}, which the "
                f"{change.list} does not have: no effect."
            )
    return notes
