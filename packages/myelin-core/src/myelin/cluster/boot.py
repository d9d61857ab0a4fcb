"""How a node is told who it is, says where it listens, and notices that its parent is gone.

A provider starts ``python -m myelin worker --boot-stdin`` and writes one *boot line* to its stdin, a channel that
nobody else can read; stdin then stays open for as long as the node is wanted. The worker prints one *announcement* to
its stdout as soon as it listens. Both are single lines of JSON, so that they can travel through a pipe, an SSH session
or a container's log alike.

Two things end a worker whose parent is gone: the end of stdin, which the worker watches, and, where the provider asked
for it and the system is Linux, the kernel's own signal (:func:`die_with_parent`).
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from typing import Any

from pydantic import SecretStr

from myelin.cluster.provider import BootSpec
from myelin.errors import WireError
from myelin.transport.contract import Endpoint
from myelin.values import Attempt, NodeId, RunId

MAX_BOOT_LINE_BYTES = 1 << 20
MAX_ANNOUNCEMENT_CHARACTERS = 16_384
MAX_CANDIDATES = 64

PARENT_VARIABLE = "MYELIN_PARENT_PID"
"""Set by a provider whose process must not be outlived by the node; read by :func:`die_with_parent`."""

CORES_VARIABLE = "MYELIN_NODE_CORES"
"""Set by a provider whose nodes share a machine: how many of its cores the node computes with unless it is told."""

CORE_SET_VARIABLE = "MYELIN_NODE_CORE_SET"
"""Set by a provider whose nodes share a machine: the cores that the node keeps to, as numbers and commas."""

_BOOT_KEY = "myelin-boot"
_ANNOUNCEMENT_KEY = "myelin-listening"
_FORMAT = 1
_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CANDIDATE = re.compile(r"[!-~]{1,255}")
_PR_SET_PDEATHSIG = 1


def boot_line(spec: BootSpec) -> bytes:
    """The boot line of ``spec``: JSON, UTF-8, ended by a newline. It holds secrets in clear."""
    document = {
        _BOOT_KEY: _FORMAT,
        "run": spec.run,
        "node": spec.node,
        "attempt": spec.attempt,
        "secret": spec.secret.get_secret_value(),
        "transport": spec.transport,
        "engine": spec.engine,
        "bind": spec.bind,
        "environment": {name: value.get_secret_value() for name, value in spec.environment.items()},
    }
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def read_boot_line(line: bytes) -> BootSpec:
    """The spec in a boot line.

    Raises:
        WireError: It isn't one; the message names the field, and never a value, since most are secret.
    """
    if not line.strip():
        raise _not_a_boot_line("it is empty")
    if len(line) > MAX_BOOT_LINE_BYTES:
        raise _not_a_boot_line(f"it has more than {MAX_BOOT_LINE_BYTES} bytes")
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        raise _not_a_boot_line("it is not JSON") from None
    if not isinstance(document, dict) or document.get(_BOOT_KEY) != _FORMAT:
        raise _not_a_boot_line(f"it has no {_BOOT_KEY!r} of {_FORMAT}")
    environment = document.get("environment")
    if not isinstance(environment, dict) or not all(
        _VARIABLE.fullmatch(name) and isinstance(value, str) and "\0" not in value
        for name, value in environment.items()
    ):
        raise _not_a_boot_line("its environment is not a table of variables")
    attempt = document.get("attempt")
    if not isinstance(attempt, int) or isinstance(attempt, bool) or not 1 <= attempt < 1 << 32:
        raise _not_a_boot_line("its attempt is not a count")
    return BootSpec(
        run=RunId(_text(document, "run", _IDENTIFIER)),
        node=NodeId(_text(document, "node", _IDENTIFIER)),
        attempt=Attempt(attempt),
        secret=SecretStr(_text(document, "secret")),
        transport=_text(document, "transport"),
        engine=_text(document, "engine"),
        bind=_text(document, "bind"),
        environment={name: SecretStr(value) for name, value in environment.items()},
    )


def announcement(endpoint: Endpoint) -> str:
    """The line, without its newline, by which a worker says where it listens."""
    return json.dumps({_ANNOUNCEMENT_KEY: _FORMAT, "candidates": endpoint.candidates}, separators=(",", ":"))


def parse_announcement(line: str) -> Endpoint | None:
    """The endpoint in ``line``, or None where it is anything but a well-formed announcement."""
    if not line.lstrip().startswith("{") or len(line) > MAX_ANNOUNCEMENT_CHARACTERS or _ANNOUNCEMENT_KEY not in line:
        return None
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get(_ANNOUNCEMENT_KEY) != _FORMAT:
        return None
    candidates = document.get("candidates")
    if not isinstance(candidates, list) or not 1 <= len(candidates) <= MAX_CANDIDATES:
        return None
    if not all(isinstance(candidate, str) and _CANDIDATE.fullmatch(candidate) for candidate in candidates):
        return None
    return Endpoint(tuple(candidates))


def die_with_parent(environment: Mapping[str, str] = os.environ) -> bool:
    """Have the kernel kill this process when the provider's process ends, if the provider asked for that.

    A worker calls it first of all. It does nothing, and answers False, without :data:`PARENT_VARIABLE` in the
    environment or on another system than Linux; watching stdin is then what ends the worker. The signal is SIGKILL:
    a worker that is in the middle of a long computation could not obey any other.

    If the parent has ended before the call, the process exits at once with status 1.

    Source: ``prctl(2)``, ``PR_SET_PDEATHSIG``. It tells of the end of the *thread* that started us; providers start
    nodes from their event loop's thread, which lives as long as they do.
    """
    parent = environment.get(PARENT_VARIABLE, "")
    if not parent.isdecimal() or not sys.platform.startswith("linux"):
        return False
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        return False
    if os.getppid() != int(parent):  # it ended between our start and the call above: nobody would tell us any more
        os._exit(1)
    return True


def _text(document: Mapping[str, Any], name: str, pattern: re.Pattern[str] | None = None) -> str:
    value = document.get(name)
    if not isinstance(value, str) or not value or "\0" in value or (pattern and not pattern.fullmatch(value)):
        raise _not_a_boot_line(f"its {name} is missing or malformed")
    return value


def _not_a_boot_line(why: str) -> WireError:
    return WireError(
        f"the first line on stdin is not a boot line: {why}",
        "a provider writes it there; `myelin serve` starts a pipeline with all its nodes",
        reason="boot-line",
    )
