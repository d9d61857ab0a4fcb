"""A «rented machine» on loopback: a real ``sshd`` with a folder, host keys and a login of its own.

What runs in it runs as the user of the test, and shares the host's network. So its inside ports are real ports of
127.0.0.1, and what a port map makes of them is a TCP forwarder on another one. Vast.ai's SSH proxy is a forwarder on
127.0.0.2, so that a client that pairs the proxy's host with the direct port finds nobody.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

DIRECT_HOST = "127.0.0.1"
PROXY_HOST = "127.0.0.2"
_START_S = 60.0
_END_S = 30.0
_CLOCK_S = 5.0
"""How far the time at which a process is said to have started may be off; Linux counts from a whole second."""


def sshd_path() -> str:
    """Where ``sshd`` is; empty where it isn't installed."""
    return (
        shutil.which("sshd", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))) or ""
    )


class FakeMachine:
    """One machine. :meth:`start` it, and :meth:`stop` it whatever happens.

    Args:
        folder: Its own; also its home.
        environment: What its start script sees besides ``PATH`` and ``HOME``.
        login: Variables of every login, as an image sets them.
        onstart: A shell script, run once before ``sshd`` starts.
        inside_ports: Ports that are mapped to the outside.
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        onstart: str,
        inside_ports: tuple[int, ...],
        login: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.ports: dict[int, int] = {}
        self.proxy_port = 0
        self._environment = dict(environment)
        self._login = dict(login or {})
        self._onstart = onstart
        self._inside_ports = inside_ports
        self._port = 0
        self._held: socket.socket | None = None
        self._over = False
        self._born = time.time() - _CLOCK_S
        self._sshd: subprocess.Popen[bytes] | None = None
        self._started: list[subprocess.Popen[bytes]] = []
        self._forwarders: list[Forwarder] = []
        self._lock = threading.Lock()

    def start(self, *, mapped: bool = True, ssh: bool = True) -> None:
        """Run the start script, then ``sshd``; return once that listens.

        Args:
            mapped: Whether ports are mapped; without, only the proxy reaches it.
            ssh: Without, nothing answers behind the ports.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "authorized_keys").touch(mode=0o600)
        self._held = held_port()
        self._port = self._held.getsockname()[1]
        self._forward_to(self._port, PROXY_HOST)
        self.proxy_port = self._forwarders[-1].port
        if mapped:
            self.ports[22] = self._port
            for inside in self._inside_ports:
                self._forward_to(inside, DIRECT_HOST)
                self.ports[inside] = self._forwarders[-1].port
        self._run_onstart()
        self.new_host_key()
        if ssh:
            self.start_sshd()

    def start_sshd(self) -> None:
        """Start ``sshd`` and wait until it listens. Of a machine that has ended, nothing is started."""
        with self._lock:
            if self._over:
                return
            sshd = self._spawn_sshd()
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and sshd.poll() is None:
            with suppress(OSError), socket.create_connection((DIRECT_HOST, self._port), timeout=1):
                return
            time.sleep(0.02)
        if not self._over:
            raise RuntimeError(f"sshd did not start: {(self.folder / 'sshd.log').read_text()}")

    def _spawn_sshd(self) -> subprocess.Popen[bytes]:
        with suppress(OSError):
            Path("/run/sshd").mkdir(exist_ok=True)  # where it separates privileges, if we are root
        with (self.folder / "sshd.log").open("ab") as log:
            self._sshd = subprocess.Popen(
                [sshd_path(), "-D", "-e", "-f", str(self._write_configuration())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ.get("PATH", os.defpath)},
                start_new_session=True,
            )
        self._started.append(self._sshd)
        return self._sshd

    def stop_sshd(self) -> None:
        """Kill ``sshd``, and with it every session and what runs in it."""
        if self._sshd is not None:
            kill_tree(self._sshd)
            self._kill_sessions()
            self._sshd = None

    def cut_connections(self) -> None:
        """Break every SSH connection; what logins have started may go on, and one can log in again."""
        if self._sshd is not None:
            with suppress(psutil.Error):
                for process in psutil.Process(self._sshd.pid).children(recursive=True):
                    with suppress(psutil.Error):
                        if process.name().startswith("sshd"):
                            process.kill()

    def new_host_key(self) -> None:
        """Make another host key; takes effect when ``sshd`` starts."""
        path = self.folder / "host_key"
        path.unlink(missing_ok=True)
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, stdin=subprocess.DEVNULL
        )

    def authorize(self, public_key: str) -> None:
        """Let a key in."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "authorized_keys").open("a", encoding="ascii") as file:
            file.write(f"{public_key.strip()}\n")

    def processes(self) -> list[psutil.Process]:
        """What runs in it, without ``sshd`` itself and what that starts for a connection."""
        kept = []
        for process in self._sessions():
            with suppress(psutil.Error):
                if not process.name().startswith("sshd") and _runs(process):
                    kept.append(process)
        return kept

    def stop(self) -> None:
        """End it, and everything that runs in it."""
        with self._lock:
            self._over = True
            for process in self._started:
                kill_tree(process)
            self._started.clear()
            self._kill_sessions()
            for forwarder in self._forwarders:
                forwarder.close()
            self._forwarders.clear()
            if self._held is not None:
                self._held.close()

    def _kill_sessions(self) -> None:
        for process in self._sessions():
            kill_tree(process)

    def _sessions(self) -> list[psutil.Process]:
        """What logins have started: also what has left its session, as a container's end would find it."""
        found = []
        home = str(self.folder)
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.create_time() >= self._born and process.environ().get("HOME") == home:
                    found.append(process)
        return found

    def _forward_to(self, port: int, host: str) -> None:
        self._forwarders.append(Forwarder(host, port))

    def _run_onstart(self) -> None:
        script = self.folder / "onstart.sh"
        script.write_text(self._onstart, encoding="utf-8")
        told = {f"VAST_TCP_PORT_{inside}": str(outside) for inside, outside in self.ports.items()}
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.folder),
            **self._environment,
            **told,
        }
        # It goes on running for as long as the machine does, as the first process of a container would.
        shell = subprocess.Popen(
            ["sh", "-c", f"sh '{script}'; touch '{self.folder}/started'; sleep infinity"],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._started.append(shell)
        deadline = time.monotonic() + _START_S
        while not (self.folder / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _write_configuration(self) -> Path:
        session = self.folder / "session.sh"
        variables = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in self._login.items())
        session.write_text(
            f"{variables}export HOME='{self.folder}'\ncd \"$HOME\" || exit 1\n"
            # The service's images start tmux for a login, which is no use to a program.
            "if [ ! -e .no_auto_tmux ]; then echo 'open terminal failed: not a terminal' >&2; exit 1; fi\n"
            'exec sh -c "$SSH_ORIGINAL_COMMAND"\n',
            encoding="utf-8",
        )
        path = self.folder / "sshd_config"
        settings = {
            "Port": self._port,
            "ListenAddress": DIRECT_HOST,
            "HostKey": self.folder / "host_key",
            "PidFile": "none",
            "UsePAM": "no",
            "StrictModes": "no",
            "AuthorizedKeysFile": self.folder / "authorized_keys",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "PermitRootLogin": "yes",
            "AllowTcpForwarding": "yes",
            "MaxStartups": "100",
            "PrintMotd": "no",
            "LogLevel": "VERBOSE",
            # Otherwise the user's own shell would read the user's own start files.
            "SetEnv": f'"HOME={self.folder}"',
            "ForceCommand": f"sh '{session}'",
        }
        path.write_text("".join(f"{name} {value}\n" for name, value in settings.items()), encoding="utf-8")
        return path


class Forwarder:
    """Carries TCP connections from a free port of ``host`` to a port of 127.0.0.1, in threads of its own."""

    def __init__(self, host: str, to_port: int) -> None:
        self._to_port = to_port
        self._listener = socket.create_server((host, 0), backlog=100)
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, name=f"forward to {to_port}", daemon=True).start()

    def close(self) -> None:
        """Stop, and break what is open."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in list(self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((DIRECT_HOST, self._to_port), timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for each in (near, far):
                with suppress(OSError):  # it may be broken already
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open.add(each)
            threading.Thread(target=self._carry, args=(near, far), daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        back = threading.Thread(target=self._pump, args=(far, near), daemon=True)
        back.start()
        self._pump(near, far)
        back.join()
        for each in (near, far):
            self._open.discard(each)
            each.close()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def held_port() -> socket.socket:
    """A socket that keeps a port of loopback: nobody is given it by chance while the socket is open, and a server that
    sets ``SO_REUSEADDR``, as ``sshd`` does, can listen there."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((DIRECT_HOST, 0))
    return holder


def kill_tree(process: subprocess.Popen[bytes] | psutil.Process) -> None:
    """Kill a process and everything below it, and wait until nothing of it does anything."""
    victims: list[psutil.Process] = []
    with suppress(psutil.Error):
        root = psutil.Process(process.pid)
        victims = [root, *root.children(recursive=True)]
    for victim in victims:
        with suppress(psutil.Error):
            victim.kill()
    if isinstance(process, subprocess.Popen):
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # it leads a group, in which orphans are found as well
        process.kill()
        process.wait(timeout=_END_S)
    deadline = time.monotonic() + _END_S
    while any(_runs(victim) for victim in victims) and time.monotonic() < deadline:
        time.sleep(0.01)


def _runs(process: psutil.Process) -> bool:
    """Whether it does something still; one that only waits to be reaped by its new parent doesn't."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
