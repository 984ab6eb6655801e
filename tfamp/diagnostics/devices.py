"""Which device an audit or a description is about: this host's, or one of the table."""

from typing import NamedTuple

from tfamp import device_table, hardware


class Subject(NamedTuple):
    """A device, what is known of its speed, and whether this host has it.

    Attributes:
      device: The `hardware.DeviceDescription`.
      peaks: Peak rates; None where they are not known.
      simulated: Whether it comes from the table and not from this host.
    """

    device: hardware.DeviceDescription
    peaks: device_table.Peaks | None
    simulated: bool

    @property
    def label(self) -> str:
        """The device's name, with "simulated" where it is."""
        return self.device.label + (", simulated" if self.simulated else "")


Device = str | device_table.TableDevice | hardware.DeviceDescription | None


def subject(device: Device = None) -> Subject:
    """Returns what an audit is about.

    Args:
      device: None for this host's training device (its first accelerator, else its
        CPU); a key or an entry of `device_table`; or a `DeviceDescription`, as
        `hardware.read_devices` returns for this host's.

    Returns:
      A `Subject`.

    Raises:
      ValueError: If the key is not in the table; TypeError for another type.
    """
    if isinstance(device, str):
        device = device_table.get(device)
    if isinstance(device, device_table.TableDevice):
        return Subject(description(device), device.peaks, True)
    if device is None:
        found = hardware.read_devices()
        chosen = ([d for d in found if d.kind != "CPU"] or found)[0]
        return Subject(chosen, _peaks(chosen), False)
    if isinstance(device, hardware.DeviceDescription):
        here = device in hardware.read_devices()
        return Subject(device, _peaks(device), not here)
    raise TypeError(
        "`device` must be None, a key or an entry of `device_table`, or a "
        f"`DeviceDescription`. Received: device={device!r}."
    )


def description(entry: device_table.TableDevice) -> hardware.DeviceDescription:
    """Returns a device of the table as the decisions take it."""
    return hardware.DeviceDescription(
        kind=entry.kind,
        name=entry.name,
        compute_capability=entry.compute_capability,
        cpu_flags=entry.cpu_flags,
        onednn=entry.onednn,
    )


def _peaks(device):
    entry = device_table.find(device.name) if device.kind == "GPU" else None
    return entry.peaks if entry else None
