"""What runs on a rented machine: the script at its start, and the command that SSH runs. Pure, without secrets."""

from __future__ import annotations

import shlex

MAX_ONSTART_CHARACTERS = 4048
"""Vast.ai's own limit."""
HEARTBEAT = ".myelin-alive"
"""A file in the login's home that is touched for as long as a worker runs."""
NODE_FOLDER = ".myelin-node"
"""A folder in the login's home: the worker's output, its exit status, and the process that keeps it."""
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


def boot_command(python: str, setup: str, dead_man_s: float, seen: tuple[int, int] = (0, 0)) -> str:
    """What SSH runs: it starts the node's worker, or finds the one that an earlier session has started, and follows it.

    The first line of standard input is the boot line; an empty one starts nothing. The worker is not a child of the
    session: it outlives a lost connection and the orchestrator, for as long as its own patience lasts. Its *keeper*
    holds its standard input open, keeps the heartbeat of the dead-man's switch fresh, and notes its exit status. The
    boot line goes from pipe to pipe and is in no argument and no file.

    What the setup and the worker write to standard error is in a file of the node, the announcement in another; both
    are followed until the worker ends, whose exit status is the session's: 97 where the setup failed, 98 where there
    is no worker and none was to be started.

    Args:
        seen: How many lines of standard output and standard error an earlier session has had.
    """
    fresh = f"touch ~/{HEARTBEAT}; sleep {beat_s(dead_man_s):g}"
    keeper = (
        'trap \'\' HUP; IFS= read -r boot || exit; cd; exec 9<>"$1/in"; echo $$ >"$1/keeper"; '
        f"( while kill -0 $$; do {fresh}; done ) 9>&- & "
        f'{shlex.quote(python)} -m myelin worker --boot-stdin <"$1/in" >>"$1/out" 2>>"$1/err" 9>&- & '
        'printf "%s\\n" "$boot" >&9; boot=; wait $!; echo $? >"$1/status"; rm -f "$1/keeper"'
    )
    lines = (
        f'd=~/{NODE_FOLDER}; umask 077; mkdir -p "$d"; IFS= read -r boot',
        'alive() { k=$(cat "$d/keeper" 2>/dev/null) && kill -0 "$k" 2>/dev/null; }',
        'mine() { [ "$(readlink "$d/starting")" = $$ ]; }',
        "follow() {",
        f'  tail -n +{seen[0] + 1} -f "$d/out" 2>/dev/null & t=$!',
        f'  tail -n +{seen[1] + 1} -f "$d/err" >&2 2>/dev/null & t="$t $!"',
        "}",
        # Followers are ended once they have read all, however slow the machine is; where /proc doesn't tell, at once.
        "has_read() {",
        '  for f in /proc/"$1"/fd/*; do',
        '    [ "$f" -ef "$2" ] || continue',
        '    [ "$(sed -n "s/^pos:[^0-9]*//p" "/proc/$1/fdinfo/${f##*/}")" = "$(($(wc -c <"$2")))" ]; return',
        "  done 2>/dev/null",
        '  [ ! -d "/proc/$1" ]',
        "}",
        "leave() {",
        '  n=0; until [ $((n += 1)) -gt 50 ] || { has_read ${t% *} "$d/out" && has_read ${t#* } "$d/err"; }',
        "  do sleep 0.1; done",
        '  sleep 0.1; kill $t 2>/dev/null; exit "$1"',
        "}",
        # One session starts the worker; the link says which one, and is void where that one has ended.
        'until alive || ln -s $$ "$d/starting" 2>/dev/null; do',
        '  kill -0 "$(readlink "$d/starting")" 2>/dev/null || rm -f "$d/starting"',
        "  sleep 0.1",
        "done",
        "if alive; then",
        '  mine && rm -f "$d/starting"; follow',
        'elif [ -z "$boot" ]; then',
        '  rm -f "$d/starting"; follow; leave "$(cat "$d/status" 2>/dev/null || echo 98)"',
        "else",
        '  rm -f "$d/in" "$d/out" "$d/err" "$d/status" "$d/keeper"; : >"$d/out"; : >"$d/err"; mkfifo "$d/in"; follow',
        f"  ( while kill -0 $$ && mine; do {fresh}; done ) </dev/null >/dev/null 2>&1 &",
        f'  ( {setup}\n  ) </dev/null >>"$d/err" 2>&1 || {{',
        '    echo "the setup of the node failed" >>"$d/err"; echo 97 >"$d/status"; rm -f "$d/starting"; leave 97; }',
        f'  printf "%s\\n" "$boot" | setsid sh -c {shlex.quote(keeper)} keeper "$d" >/dev/null 2>&1 &',
        '  until [ -s "$d/keeper" ] || [ -s "$d/status" ]; do sleep 0.02; done',
        '  rm -f "$d/starting"',
        "fi",
        "boot=",
        "while alive; do sleep 0.2; done",
        'leave "$(cat "$d/status" 2>/dev/null || echo 1)"',
    )
    return f"exec sh -c {shlex.quote(chr(10).join(lines))}"
