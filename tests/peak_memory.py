"""The most memory that a process has had, by Linux's account.

`resource.getrusage` will not do: its figure for a child begins at the size of the process that it was forked from.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def resident_memory(field: str = "VmRSS") -> int:
    """Resident bytes of this process now, or with `field="VmHWM"` at most since `forget_peak` or since it began."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def peak_memory() -> int:
    """The most resident bytes since `forget_peak`, or since this program began."""
    return resident_memory("VmHWM")


def forget_peak() -> None:
    """Let `peak_memory` begin anew, at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def bounded_memory(growth: int) -> Iterator[None]:
    """A context in which an allocation that enlarges this process by more than `growth` bytes is a MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (resident_memory("VmSize") + growth, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
