"""Opens a page in headless Chromium, which must be installed; it goes nowhere else."""

import pathlib
import shutil
import subprocess
import tempfile
from typing import NamedTuple

from tfamp import errors

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--disable-extensions", "--hide-scrollbars"),
    # No address of a network is found: what a page shows, it shows offline.
    "--host-resolver-rules=MAP * ~NOTFOUND",
    # Long enough for what happens after loading; the clock runs ahead when idle.
    *("--virtual-time-budget=3000", "--enable-logging=stderr", "--v=0"),
)
_TIMEOUT = 60  # Seconds; a page takes one or two.
_CONSOLE = ":CONSOLE:"


class Shown(NamedTuple):
    """What came of opening a page.

    Attributes:
      output: What Chromium wrote, with "--dump-dom" the document after loading.
      messages: Lines of the page's console: errors, and requests that were blocked.
    """

    output: str
    messages: tuple[str, ...]


def find() -> str | None:
    """Returns the path of Chromium or Chrome; None if neither is installed."""
    found = map(shutil.which, _NAMES)
    return next((path for path in found if path), None)


def require() -> str:
    """Returns the path of Chromium or Chrome.

    Raises:
      RunError: If neither is installed.
    """
    chromium = find()
    if chromium is None:
        raise errors.RunError(
            f"Found none of {', '.join(_NAMES)} on PATH. Install Chromium to look at "
            "the page."
        )
    return chromium


def show(page: pathlib.Path, *options: str, dark: bool = False) -> Shown:
    """Opens a page of this machine.

    Args:
      page: An HTML file.
      *options: More of Chromium's, such as "--dump-dom".
      dark: Whether the reader prefers dark pages.

    Returns:
      A `Shown`.

    Raises:
      RunError: If there is no Chromium, or it fails.
    """
    chromium = require()
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        place = f"--user-data-dir={profile}"
        command = [
            chromium,
            *_OPTIONS,
            scheme,
            place,
            *options,
            page.resolve().as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
    if done.returncode:
        raise errors.RunError(
            f"Chromium stopped with code {done.returncode}: {done.stderr[-500:]}"
        )
    lines = [line for line in done.stderr.splitlines() if _CONSOLE in line]
    return Shown(done.stdout, tuple(lines))


def screenshot(
    page: pathlib.Path, image: pathlib.Path, width: int, height: int, dark: bool = False
) -> Shown:
    """Takes a picture of the top of a page.

    Args:
      page: An HTML file.
      image: The PNG file to write.
      width: Of the window, in pixels; Chromium takes no less than about 500.
      height: Of the window, in pixels.
      dark: Whether the reader prefers dark pages.

    Returns:
      A `Shown`.

    Raises:
      RunError: If there is no Chromium, or it fails.
    """
    size = f"--window-size={width},{height}"
    return show(page, size, f"--screenshot={image.resolve()}", dark=dark)
