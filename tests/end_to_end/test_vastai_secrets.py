"""Secrets planted in one run on a fake Vast.ai, in which something fails, are seen nowhere."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from vastai_support import identity_at, service, tiny_model, told

from myelin_testkit.fake_vastai import Trouble

HUB_TOKEN = "hf_planted_token_0123456789abcdef"


class Onlooker(threading.Thread):
    """Reads every process's command line, as anybody on the machine may, and the run's secret from its ledger."""

    def __init__(self, state: Path) -> None:
        super().__init__(daemon=True)
        self.commands: set[str] = set()
        self.run_secrets: set[str] = set()
        self._state = state
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            for process in psutil.process_iter():
                try:
                    self.commands.add(" ".join(process.cmdline()))
                except psutil.Error:
                    continue
            for path in self._state.glob("*.sqlite*") if self._state.is_dir() else ():
                self._look_into(path)
            time.sleep(0.03)

    def _look_into(self, path: Path) -> None:
        try:
            with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as base:
                self.run_secrets |= {secret for (secret,) in base.execute("SELECT secret FROM runs") if secret}
        except sqlite3.Error:
            return

    def stop(self) -> None:
        self._over.set()
        self.join()


@pytest.mark.timeout(120)
def test_no_planted_secret_is_in_a_log_a_span_an_argument_or_an_error(myelin, tmp_path):
    identity = identity_at(tmp_path / "id_ed25519")
    onlooker = Onlooker(tmp_path / "state")
    onlooker.start()
    with service(tmp_path / "machines") as fake:
        # One that fails at its create, and one that never gets to run: both are told of.
        fake.next_machines(Trouble(answer="error-and-contract"), Trouble(), Trouble(state="exited", message="bad disk"))
        environment = {**told(fake, identity), "HF_TOKEN": HUB_TOKEN}
        words = ("prompt", "-N", "2", "--yes", "--run-id", "secretive", "--raw", "--engine", "reference")
        model = ("--model", tiny_model(tmp_path / "model.gguf"), "--max-context", "256", "--max-tokens", "4")
        seen = ("--log-level", "debug", "--trace-file", str(tmp_path / "trace.jsonl"))
        frames = (
            "--telemetry-frame-log",
            str(tmp_path / "frames.bin"),
            "--set",
            f"runtime.log_dir={tmp_path / 'logs'}",
        )
        done = myelin.run(*words, *model, *seen, *frames, "hello", **environment)
        onlooker.stop()
        refused = myelin.run(*words, *model, "hello", **{**environment, "VAST_API_KEY": f"{fake.api_key}-wrong"})
        assert refused.code == 1
        private = [line for line in identity.read_text().splitlines() if not line.startswith("-----")]
        keys = [fake.api_key, *(rented.key for rented in fake.rented)]
        requests = "".join(request.path + request.body for request in fake.seen)

    assert onlooker.run_secrets, "the run's own secret was in its ledger while it ran"
    assert any("--boot-stdin" in command for command in onlooker.commands)
    texts = {
        path.relative_to(tmp_path): path.read_bytes().decode("latin-1")
        for path in tmp_path.rglob("*")
        # All but the files of the keys themselves; the ledger has forgotten a run's secret once that has ended.
        if path.is_file() and path.name not in ("id_ed25519", "host_key")
    }
    assert Path("trace.jsonl") in texts
    assert any(path.parts[0] == "logs" for path in texts)
    assert any(path.name.startswith("frames") for path in texts)
    texts |= {Path("commands"): "\n".join(onlooker.commands), Path("requests"): requests}
    texts |= {Path("out"): done.out, Path("err"): done.err, Path("refusal"): refused.out + refused.err}
    secrets = [HUB_TOKEN, *keys, *onlooker.run_secrets, *private]
    assert [(str(path), secret) for path, text in texts.items() for secret in secrets if secret in text] == []
