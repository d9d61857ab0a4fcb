"""A fake Vast.ai for the end-to-end tests, and what the command is told of it."""

from __future__ import annotations

import getpass
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from myelin_testkit.fake_machine import sshd_path
from myelin_testkit.fake_vastai import FakeVastai
from myelin_testkit.synthetic import Recipe, write_model


def identity_at(path: Path) -> Path:
    """An SSH key of our own, made at ``path``."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


def told(fake: FakeVastai, identity: Path, ssh_timeout_s: float = 90.0) -> dict[str, str]:
    """All that the command is told of the service, by variables alone: nothing secret is in its words.

    Args:
        ssh_timeout_s: After how long a machine is given up whose SSH doesn't answer.
    """
    return {
        "VAST_API_KEY": fake.api_key,
        "VAST_URL": fake.url,
        "MYELIN_NODE_PROVIDER": "vastai",
        "MYELIN_VASTAI_SSH_IDENTITY": str(identity),
        "MYELIN_VASTAI_SSH_USER": getpass.getuser(),
        "MYELIN_VASTAI_PYTHON": sys.executable,
        "MYELIN_VASTAI_SETUP": ":",
        "MYELIN_VASTAI_NODE_BIND": "127.0.0.1",
        "MYELIN_VASTAI_POLL_S": "0.1",
        "MYELIN_VASTAI_CALL_SPACING": "0.011",
        "MYELIN_VASTAI_SSH_TIMEOUT_S": f"{ssh_timeout_s:g}",
    }


@contextmanager
def service(folder: Path) -> Iterator[FakeVastai]:
    """The fake, whose machines are ``sshd``s below ``folder``."""
    if not sshd_path():
        pytest.skip("needs sshd: apt-get install openssh-server")
    with FakeVastai(folder) as fake:
        yield fake


def tiny_model(path: Path) -> str:
    """A model of a few hundred kilobytes, which the reference engine computes in a moment."""
    return str(write_model(Recipe(n_layers=4), path)[0])
