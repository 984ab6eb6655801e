"""What TensorFlow's profiler saw a GPU do: kernels by time, and how long it waited."""

import collections
import pathlib
from typing import Any

from tfamp.facts import names

_MOST = 15  # Kernels that are kept.
_NAME = 120  # Characters of a kernel's name.


def read(folder: pathlib.Path, steps: int) -> dict[str, Any] | None:
    """Returns the figures of a profile; None where it saw no GPU.

    Args:
      folder: Of `tf.profiler.experimental.start`.
      steps: How many there were.

    Returns:
      Plain data of a step: busy, the milliseconds in which the GPU did something;
      launches; kernels, those that took most: [name, milliseconds, times]. How long it
      waits is no part of it: with the profiler a launch takes longer.
    """
    kind = names.resolve("tensorflow.tsl.profiler.protobuf.xplane_pb2:XSpace")
    for file in folder.rglob("*.xplane.pb") if kind else ():
        for plane in kind.FromString(file.read_bytes()).planes:
            if plane.name.startswith("/device:GPU") and (events := _events(plane)):
                return _summary(events, steps)
    return None


def _events(plane):
    """[(name, begin, end)] in picoseconds, of all streams, in order."""
    return sorted(
        (
            (plane.event_metadata[event.metadata_id].name, begin, begin + length)
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
            if (length := event.duration_ps) >= 0
            and (begin := 1000 * line.timestamp_ns + event.offset_ps) >= 0
        ),
        key=lambda each: each[1],
    )


def _summary(events, steps):
    busy, until = 0, events[0][1]
    spent: collections.Counter[str] = collections.Counter()
    times: collections.Counter[str] = collections.Counter()
    for name, begin, end in events:
        busy += max(0, end - max(begin, until))
        until = max(until, end)
        spent[name[:_NAME]] += end - begin
        times[name[:_NAME]] += 1
    return {
        "busy": busy / 1e9 / steps,
        "launches": len(events) / steps,
        "kernels": [
            [name, ps / 1e9 / steps, times[name] / steps]
            for name, ps in spent.most_common(_MOST)
        ],
    }
