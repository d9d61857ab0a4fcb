"""A Docker engine of a test's own: ``dockerd`` in a network namespace, with its data in a temporary folder.

It needs the extra ``docker`` (the SDK), root, Linux, Debian's ``docker.io`` (``dockerd``, ``containerd``, ``runc``,
``tini``), ``iproute2`` and ``iptables``, and no registry: images are made of what is on this machine
(:func:`root_file_system`). The namespace is joined to ours by a pair of virtual interfaces, so that containers are
reached from here by their own addresses, as on any machine that runs Docker itself; what is published on the daemon's
loopback is reached with :meth:`Engine.inside`.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from myelin_testkit.freezing import freeze, thaw

START_S = 120.0
STOP_S = 30.0
PROGRAMS = ("dockerd", "containerd", "runc", "docker-init", "iptables", "ip", "nsenter")
_SHELL_TOOLS = ("sh", "ls", "cat", "rm", "mkdir", "chown", "chmod", "sleep", "id", "env", "find")
_LIBRARIES = (
    *("libstdc++.so.6", "libgcc_s.so.1", "libz.so.1", "librt.so.1", "libpthread.so.0", "libdl.so.2", "libutil.so.1"),
    *("libresolv.so.2", "libnss_files.so.2", "libnss_dns.so.2"),
)
"""What wheels expect of any system, and the base image of Python has."""
_LEFT_OUT = {"test", "tests", "__pycache__", "site-packages", "idlelib", "tkinter", "turtledemo", "lib2to3"}
_MULTIARCH = "/lib/x86_64-linux-gnu"


def why_not() -> str:
    """Why an engine can't be started on this machine; empty where it can."""
    if not sys.platform.startswith("linux") or os.uname().machine != "x86_64":
        return "needs Linux on x86-64"
    if os.geteuid() != 0:
        return "needs root, for a network namespace"
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    return f"needs {', '.join(missing)}: apt-get install docker.io iproute2" if missing else ""


def _path() -> str:
    return os.environ.get("PATH", "") + os.pathsep + "/usr/sbin:/sbin"


class Engine:
    """A daemon that runs while the ``with`` block does.

    Attributes:
        url: For ``DOCKER_HOST``.
        pid: The daemon's process.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.url = f"unix://{folder / 'docker.sock'}"
        self.pid = 0
        self._number = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Engine:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._make_network()
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(Exception):
            self._remove_containers()
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)  # a test may have stopped it
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_S)
        if self._number:
            subprocess.run(["ip", "link", "del", self._outside], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", self._namespace], check=False, capture_output=True)
        self._unmount()
        shutil.rmtree(self._folder, ignore_errors=True)

    def inside(self, *words: str) -> list[str]:
        """The command that runs ``words`` where the daemon's machine has its loopback."""
        return ["nsenter", f"--net=/var/run/netns/{self._namespace}", *words]

    def environment(self) -> dict[str, str]:
        """Variables by which the SDK, the command line and Myelin find this daemon."""
        return {"DOCKER_HOST": self.url}

    def freeze(self) -> None:
        """The daemon answers nobody any more, until :meth:`thaw`; containers go on."""
        freeze(self.pid)

    def thaw(self) -> None:
        """It answers again."""
        thaw(self.pid)

    def log(self) -> str:
        """What the daemon has written."""
        return (self._folder / "log").read_text(errors="replace")

    @property
    def _namespace(self) -> str:
        return f"myelin-engine-{self._number}"

    @property
    def _outside(self) -> str:
        return f"myd{self._number}"

    def _make_network(self) -> None:
        for number in range(1, 250):
            words = ["ip", "link", "add", f"myd{number}", "type", "veth", "peer", "name", f"myd{number}p"]
            if subprocess.run(words, check=False, capture_output=True).returncode == 0:
                self._number = number
                break
        else:
            raise RuntimeError("no virtual interface could be made")
        ours, theirs = f"10.98.{self._number}.1", f"10.98.{self._number}.2"
        inner = ["ip", "-n", self._namespace]
        for command in (
            ["ip", "netns", "add", self._namespace],
            ["ip", "link", "set", f"{self._outside}p", "netns", self._namespace],
            ["ip", "addr", "add", f"{ours}/30", "dev", self._outside],
            ["ip", "link", "set", self._outside, "up"],
            [*inner, "addr", "add", f"{theirs}/30", "dev", f"{self._outside}p"],
            [*inner, "link", "set", f"{self._outside}p", "up"],
            [*inner, "link", "set", "lo", "up"],
            ["ip", "route", "add", f"10.99.{self._number}.0/24", "via", theirs],
        ):
            subprocess.run(command, check=True, capture_output=True)

    def _start(self) -> None:
        folder = self._folder
        words = [
            *("dockerd", "--storage-driver=overlay2", "--bip", f"10.99.{self._number}.1/24"),
            *("--data-root", str(folder / "data"), "--exec-root", str(folder / "exec")),
            *("--pidfile", str(folder / "pid"), "-H", self.url),
        ]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                self.inside(*words),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PATH": _path()},
            )
        self.pid = self._process.pid  # nsenter becomes what it runs
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"dockerd did not start:\n{self.log()[-3000:]}")
            time.sleep(0.05)

    def _unmount(self) -> None:
        """The daemon keeps a handle of its network namespace, and of what a kill has interrupted."""
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mounted in sorted((path for path in mounts if path.startswith(f"{self._folder}/")), reverse=True):
            subprocess.run(["umount", "-l", mounted], check=False, capture_output=True)

    def _answers(self) -> bool:
        import docker

        with suppress(Exception):
            client = docker.APIClient(base_url=self.url, version="auto", timeout=5)
            client.close()
            return True
        return False

    def _remove_containers(self) -> None:
        import docker

        client = docker.APIClient(base_url=self.url, version="auto", timeout=STOP_S)
        for container in client.containers(all=True):
            with suppress(Exception):
                client.remove_container(container["Id"], force=True, v=True)
        client.close()


def root_file_system(
    archive: Path, *, packages: Sequence[str] = ("pip",), files: Sequence[tuple[Path, str]] = ()
) -> None:
    """Write a small root file system of this machine's own parts as a tar file, for ``docker import``.

    It has this Python under ``/usr/local`` as the official images have it, the libraries that it needs, a shell with a
    few tools, and ``/var/cache/myelin`` for the user 10001.

    Args:
        archive: The tar file.
        packages: Names of installed packages to add to Python's own folder.
        files: More files, each with its path inside.
    """
    base, version = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
    interpreter, library = base / "bin" / version, base / "lib" / version
    needed = {*_libraries_of([interpreter, *(library / "lib-dynload").glob("*.so")]), *_named_libraries()}
    with tarfile.open(archive, "w") as tar:
        tar.add(interpreter, f"usr/local/bin/{version}", filter=_plain)
        for name in ("python3", "python"):
            _link(tar, f"usr/local/bin/{name}", version)
        tar.add(library, f"usr/local/lib/{version}", filter=_plain)
        for package in packages:
            _add_package(tar, package, f"usr/local/lib/{version}/site-packages")
        for tool in _SHELL_TOOLS:
            program = Path(os.path.realpath(shutil.which(tool) or f"/bin/{tool}"))
            needed |= set(_libraries_of([program]))
            tar.add(program, f"bin/{tool}", filter=_plain)
        for path in sorted(needed):
            loader = "lib64/ld-linux-x86-64.so.2" if "ld-linux" in path else ""
            tar.add(os.path.realpath(path), loader or f"{_MULTIARCH[1:]}/{Path(path).name}", filter=_plain)
        for file, inside in files:
            tar.add(file, inside.lstrip("/"), filter=_plain)
        for folder, mode, owner in (("tmp", 0o1777, 0), ("proc", 0o755, 0), ("var/cache/myelin", 0o755, 10001)):
            _folder(tar, folder, mode, owner)
        _text(tar, "etc/passwd", "root:x:0:0:root:/:/bin/sh\n")
        _text(tar, "etc/group", "root:x:0:\n")


def _libraries_of(programs: Collection[Path]) -> Iterator[str]:
    for program in programs:
        told = subprocess.run(["ldd", str(program)], check=False, capture_output=True, text=True).stdout
        yield from (word for word in told.split() if word.startswith("/"))


def _named_libraries() -> Iterator[str]:
    for name in _LIBRARIES:
        for folder in (_MULTIARCH, f"/usr{_MULTIARCH}"):
            if (Path(folder) / name).exists():
                yield f"{folder}/{name}"
                break


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    name = entry.name.rpartition("/")[2]
    if name in _LEFT_OUT or name.startswith("config-3"):
        return None
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _add_package(tar: tarfile.TarFile, package: str, into: str) -> None:
    from importlib.util import find_spec

    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        tar.add(folder, f"{into}/{package}", filter=_plain)


def _link(tar: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)


def _folder(tar: tarfile.TarFile, name: str, mode: int, owner: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    entry.uid = entry.gid = owner
    tar.addfile(entry)


def _text(tar: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(text)
    tar.addfile(entry, io.BytesIO(text.encode()))
