"""What long work says on standard error: a line for each part, and that it still runs.

While something runs, nothing is silent for longer than `SILENCE`. In a terminal and in
a notebook, a line that says what runs makes way for the next one.
"""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator

SILENCE = 14  # Seconds; on a busy host a thread is late.


def say(line: str) -> None:
    """Prints a line on standard error."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class Progress:
    """Scopes long work, and says how far it is.

    Args:
      verbose: 0 says nothing, as in Keras.
      what: What is said to run where there are no parts.
      at_most: Whether `total` may turn out to be less.
      seconds: When the work ends at the latest; None: when all parts are done.
      say: Function called with each line, none of which is rewritten; None: standard
        error.
      ticks: Whether it is said that something still runs: not beside Keras' own bar.

    Attributes:
      total: How many parts there are; None if that is not known, then they have no
        numbers. May be set at any time.
      number: How many have begun.
    """

    def __init__(
        self,
        verbose: int = 1,
        what: str = "running",
        *,
        at_most: bool = False,
        seconds: float | None = None,
        say: Callable[[str], object] | None = None,
        ticks: bool = True,
    ):
        self.total: int | None = None
        self.number, self._verbose, self._what, self._say = 0, verbose, what, say
        self._at_most, self._took, self._ticks = at_most, [], verbose and ticks
        self._began = self._said = time.monotonic()
        self._end = None if seconds is None else self._began + seconds
        notebook = "ipykernel" in sys.modules
        self._rewrites = say is None and (notebook or sys.stderr.isatty())
        self._label = self._runs = ""  # What a part is called, and said to be.
        self._line = ""  # What is to be rewritten.
        # Reentrant: a signal may come while a line is written, and say something.
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._watch = threading.Thread(target=self._tell, daemon=True)

    def __enter__(self):
        if self._ticks:
            self._watch.start()
        return self

    def __exit__(self, *error):
        self._ended.set()
        if self._ticks:
            self._watch.join()
        self._write("", stays=False)

    @contextlib.contextmanager
    def part(self, label: str, note: str = "") -> Iterator[None]:
        """Scopes a part, and says that it begins, and how long the rest may take.

        Args:
          label: What it is.
          note: Said in place of a time, of a part that takes none.
        """
        self.number += 1
        count = f"{'at most ' * self._at_most}{self.total}"
        self._label = f"{self.number} of {count}: {label}" if self.total else label
        self._began = time.monotonic()
        self._runs = self._label + (f" ({note})" if note else self._left())
        self._write(self._runs, stays=False)
        yield
        now = time.monotonic()
        if not note:
            self._took.append(now - self._began)
        self._began = now

    def result(self, text: str) -> None:
        """Says what came of the last part."""
        self.say(f"{self._label}: {text}" if self._rewrites else f"  {text}")

    def say(self, line: str) -> None:
        """Says something that stays."""
        self._write(line, stays=True)

    def _left(self):
        """How long the rest will take, going by what was measured so far."""
        if self._end is not None:
            seconds = max(0.0, self._end - time.monotonic())
        elif self._took and self.total:
            left = self.total - self.number + 1
            seconds = sum(self._took) / len(self._took) * left
        else:
            return ""
        most = self._at_most or self._end is not None
        words = "at most" if most else "about"
        return f" ({words} {max(1, round(seconds / 60))} min left)"

    def _tell(self):
        """Says that the part still runs, where nothing was said for a while."""
        while not self._ended.wait(max(0.0, self._said + SILENCE - time.monotonic())):
            now = time.monotonic()
            if now >= self._said + SILENCE:
                runs = self._runs if self._rewrites else ""
                runs = runs or f"... still {self._what}"
                self._write(f"{runs} ({now - self._began:.0f} s)", stays=False)

    def _write(self, line, stays):
        if not self._verbose or not (line or self._line):
            return
        with self._lock:
            self._said = time.monotonic()
            if self._rewrites:
                width = max(1, shutil.get_terminal_size().columns - 1)
                shown = line if stays else _shortened(line, width)
                # Blanks in place of what a longer line would leave.
                end = "\n" if stays else "\r" * (not line)
                sys.stderr.write(f"\r{shown:<{len(self._line)}}{end}")
                sys.stderr.flush()
                self._line = "" if stays else shown
            else:
                (self._say or say)(line)


def _shortened(line, width):
    """Cuts the middle of a line: what runs begins it, and the time ends it."""
    if len(line) <= width:
        return line
    end = min(30, width // 2)
    return f"{line[: max(0, width - end - 3)]}...{line[-end:]}"[:width]
