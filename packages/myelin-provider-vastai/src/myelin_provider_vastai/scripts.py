"""What runs on a rented machine: the script at its start, and the command that SSH runs. Pure, without secrets."""

from __future__ import annotations

import shlex

MAX_ONSTART_CHARACTERS = 4048
"""Vast.ai's own limit."""
HEARTBEAT = ".myelin-alive"
"""A file in the login's home that is touched for as long as a worker runs."""
_BEAT_S = 5.0


def onstart_script(dead_man_s: float, api_url: str) -> str:
    """What the machine runs when it starts, as a POSIX shell script.

    It keeps SSH logins out of tmux, and starts the *dead-man's switch*: where no worker has run for ``dead_man_s``
    seconds, the machine destroys itself with the key that Vast.ai gives each machine for itself
    (``CONTAINER_API_KEY``). That key reaches ``curl`` or Python by standard input, so that it is in no process list.
    """
    lines = ["touch ~/.no_auto_tmux"]
    if dead_man_s > 0:
        url = shlex.quote(f"{api_url.rstrip('/')}/api/v0/instances/")
        beat = beat_s(dead_man_s)
        lines += [
            f"touch ~/{HEARTBEAT}",
            "(",
            "  trap '' HUP",
            "  while :; do",
            f"    sleep {beat:g}",
            f"    now=$(date +%s); seen=$(stat -c %Y ~/{HEARTBEAT} 2>/dev/null || echo 0)",
            f"    [ $((now - seen)) -le {max(1, round(dead_man_s))} ] && continue",
            "    if command -v curl >/dev/null 2>&1; then",
            '      printf \'header = "Authorization: Bearer %s"\\n\' "$CONTAINER_API_KEY" |',
            f'        curl -s -m 30 -X DELETE -K - {url}"$CONTAINER_ID"/ >/dev/null 2>&1',
            "    else",
            "      printf '%s\\n' \"$CONTAINER_API_KEY\" | python3 -c 'import sys,urllib.request as u;"
            'u.urlopen(u.Request(sys.argv[1],method="DELETE",headers={"Authorization":'
            '"Bearer "+sys.stdin.readline().strip()}),timeout=30)\''
            f' {url}"$CONTAINER_ID"/ >/dev/null 2>&1',
            "    fi",
            "  done",
            ") </dev/null >/dev/null 2>&1 &",
        ]
    script = "\n".join(lines) + "\n"
    assert len(script) <= MAX_ONSTART_CHARACTERS
    return script


def setup_command(setup: str, python: str, engine: str, version: str) -> str:
    """What installs Myelin on the node: the setting, or pip for this version and the engine where it isn't there."""
    if setup:
        return setup
    packages = [f"myelin-core=={version}"]
    if engine != "reference":
        packages.append(f"myelin-worker-{engine}=={version}")
    interpreter = shlex.quote(python)
    wanted = " ".join(map(shlex.quote, packages))
    return f"{interpreter} -c 'import myelin' 2>/dev/null || {interpreter} -m pip install --quiet {wanted}"


def beat_s(dead_man_s: float) -> float:
    """Seconds between two heartbeats, and between two looks at them: several within the switch's time."""
    return min(_BEAT_S, dead_man_s / 4) if dead_man_s > 0 else _BEAT_S


def boot_command(python: str, setup: str, dead_man_s: float) -> str:
    """What SSH runs: the setup, then the worker, whose standard input is the SSH channel's.

    While the worker runs, the heartbeat of the dead-man's switch is kept fresh, also by the setup, which may take long.
    What the setup writes goes to standard error: standard output is for the announcement.
    """
    beat = f"touch ~/{HEARTBEAT}; sleep {beat_s(dead_man_s):g}"
    script = (
        f"( while kill -0 $$; do {beat}; done ) </dev/null >/dev/null 2>&1 & "
        f"( {setup} ) </dev/null 1>&2 || {{ echo 'the setup of the node failed' >&2; exit 97; }}; "
        f"exec {shlex.quote(python)} -m myelin worker --boot-stdin"
    )
    return f"exec sh -c {shlex.quote(script)}"
