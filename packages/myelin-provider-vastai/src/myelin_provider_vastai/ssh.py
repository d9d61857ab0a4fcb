"""SSH to a rented machine: whose key we log in with, which host key we believe, and what is carried."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import asyncssh

from myelin.plugin import ProviderError

CONNECT_TIMEOUT_S = 20.0
KEEPALIVE_S = 15
IDENTITY_FILES = ("id_ed25519", "id_ecdsa", "id_rsa")


@dataclass(frozen=True, slots=True)
class Identity:
    """Our SSH key. ``public`` is a line as in ``authorized_keys``; ``fingerprint`` is ``SHA256:…``."""

    key: asyncssh.SSHKey
    public: str
    fingerprint: str

    def __repr__(self) -> str:
        return f"Identity({self.fingerprint})"


def load_identity(path: Path | None, home: Path) -> Identity:
    """The key to log in with: the file that was named, or the first of the usual ones.

    Raises:
        ProviderError: There is none, or it can't be read. The message has the path, and nothing of the key.
    """
    candidates = [path] if path is not None else [home / ".ssh" / name for name in IDENTITY_FILES]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise ProviderError(
            f"there is no SSH key at {' or '.join(map(str, candidates))}",
            "make one with `ssh-keygen -t ed25519`, or name one by MYELIN_VASTAI_SSH_IDENTITY",
            reason="no-ssh-key",
        )
    try:
        key = asyncssh.read_private_key(found)
    except asyncssh.KeyEncryptionError:
        problem, hint = "is locked with a passphrase", "name one without, by MYELIN_VASTAI_SSH_IDENTITY"
    except asyncssh.KeyImportError:
        problem, hint = "is not a private key that we can read", "name another by MYELIN_VASTAI_SSH_IDENTITY"
    except OSError as error:
        problem, hint = f"can't be read: {error.strerror}", "check the file and its permissions"
    else:
        public = key.export_public_key("openssh").decode().strip()
        return Identity(key, public, key.get_fingerprint("sha256"))
    raise ProviderError(f"the SSH key {found} {problem}", hint, reason="no-ssh-key")


class HostKeys:
    """Host keys pinned on first use: the first that a machine shows is the only one it may show later."""

    def __init__(self) -> None:
        self._pins: dict[int, str] = {}

    def accept(self, instance: int, fingerprint: str) -> bool:
        """Whether ``fingerprint`` is the machine's; the first one is taken as such."""
        return self._pins.setdefault(instance, fingerprint) == fingerprint

    def forget(self, instance: int) -> None:
        """The machine is gone."""
        self._pins.pop(instance, None)


class _Pinned(asyncssh.SSHClient):
    """Checks the host key of one machine."""

    def __init__(self, keys: HostKeys, instance: int) -> None:
        self._keys = keys
        self._instance = instance
        self.changed = False

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        """Called by asyncssh, since no host is in the (empty) list of known ones."""
        self.changed = not self._keys.accept(self._instance, key.get_fingerprint("sha256"))
        return not self.changed


class HostKeyChanged(ProviderError):
    """The machine shows another host key than before: someone may sit in between."""

    default_reason = "host-key"


async def connect(
    address: tuple[str, int], user: str, identity: Identity, keys: HostKeys, instance: int
) -> asyncssh.SSHClientConnection:
    """Log in on a machine.

    Raises:
        HostKeyChanged: See there. Nothing was sent.
        OSError, asyncssh.Error: It isn't there, or doesn't let us in.
    """
    client = _Pinned(keys, instance)
    try:
        return await asyncssh.connect(
            address[0],
            address[1],
            username=user,
            client_keys=[identity.key],
            agent_path=None,
            config=None,
            preferred_auth="publickey",
            known_hosts=asyncssh.import_known_hosts(""),
            client_factory=lambda: client,
            connect_timeout=CONNECT_TIMEOUT_S,
            login_timeout=CONNECT_TIMEOUT_S,
            keepalive_interval=KEEPALIVE_S,
        )
    except asyncssh.Error:
        if client.changed:
            raise HostKeyChanged(
                f"machine {instance} shows another SSH host key than it did at first",
                "it is not used: someone may sit between it and us",
            ) from None
        raise
