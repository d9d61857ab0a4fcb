"""Whose a run is: a process of a machine, told from any other that gets the same number later."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Owner:
    """A process.

    Attributes:
        host: The machine's name; a container has one of its own, and process numbers of its own.
        process: Its number; 0 is nobody.
        started: When it began, in the system's own terms: only ever compared with itself.
    """

    host: str = ""
    process: int = 0
    started: str = ""

    def __str__(self) -> str:
        """``process 4711`` or ``process 4711 on otherhost``."""
        if not self.process:
            return "nobody"
        return f"process {self.process}" + ("" if self.is_here else f" on {self.host}")

    @classmethod
    def this_process(cls) -> Owner:
        """We."""
        return cls(socket.gethostname(), os.getpid(), start_of(os.getpid()))

    @property
    def is_here(self) -> bool:
        """It is, or was, a process of this machine."""
        return self.host == socket.gethostname()

    @property
    def lives(self) -> bool:
        """It still runs. Of another machine's process nobody here can say that it doesn't."""
        if not self.process:
            return False
        return not self.is_here or (self.started != "" and start_of(self.process) == self.started)


NOBODY = Owner()


def start_of(process: int) -> str:
    """When a process began; empty where there is none, or only its remains (a zombie).

    Source: ``proc_pid_stat(5)``, fields 3 and 22 (clock ticks since the boot, so that a clock that is set right in
    between changes nothing), with the boot's own id; elsewhere psutil's ``create_time``.
    """
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read().strip()
    except OSError:
        return _start_elsewhere(process)
    return "" if words[0] in (b"Z", b"X") else f"{words[19].decode()}.{boot.decode()}"


def _start_elsewhere(process: int) -> str:
    if os.path.exists("/proc/self/stat"):
        return ""  # this system would have told
    import psutil

    try:
        found = psutil.Process(process)
        return "" if found.status() == psutil.STATUS_ZOMBIE else repr(found.create_time())
    except psutil.Error:
        return ""
