"""The page over a real `myelin serve`: its bootstrap, a request, a node that is killed and replaced, its end."""

from __future__ import annotations

import json
import re
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from browser_support import chromium, sideways, until
from end_to_end_support import SMOLLM2, ask

from myelin_testkit.freezing import freeze, thaw

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]


class Serving:
    """What a server says on standard error, as it comes."""

    def __init__(self, process) -> None:
        self.lines: list[str] = []
        self._came = threading.Condition()
        threading.Thread(target=self._read, args=(process.stderr,), daemon=True).start()

    def _read(self, stream) -> None:
        for line in stream:
            with self._came:
                self.lines.append(line)
                self._came.notify_all()

    def wait_for(self, pattern: str, seconds: float = 150) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            return next((match for line in self.lines if (match := re.search(pattern, line))), None)

        with self._came:
            assert self._came.wait_for(lambda: found() is not None, seconds), "".join(self.lines)
        match = found()
        assert match is not None
        return match


def health(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
            return answer.status, json.load(answer)["status"]
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)["status"]


def test_a_whole_life_is_seen(myelin, tmp_path):
    with chromium(tmp_path / "pictures") as browser:
        process = myelin.start(
            *("serve", "-N", "2", "--model", SMOLLM2, "--rpc-bind", "127.0.0.1:0", "--http-bind", "127.0.0.1:0"),
            *("--threads", "1", "--max-context", "1024"),
        )
        serving = Serving(process)
        url = serving.wait_for(r"Dashboard on (http://\S+)/dashboard")[1]

        # The bootstrap, as it happens. The nodes are held until the page is there: a run with compiled kernels can be
        # up before a browser has shown anything.
        nodes = myelin.wait_for_nodes(2)
        for node in nodes:
            freeze(node.pid)
        page = browser.open(f"{url}/dashboard")
        page.wait_for_selector("#connection[data-state=live]")
        assert page.locator("#run-state").inner_text() == "starting"
        assert health(url)[0] == 503
        for node in nodes:
            thaw(node.pid)
        page.wait_for_selector(".stage[data-node=stage-1][data-state=loading]", timeout=120_000)
        browser.picture(page, "real-bootstrap", whole=False)
        page.wait_for_selector(".stage[data-node=stage-1][data-state=serving]", timeout=120_000)
        assert health(url) == (200, "serving")
        phases = page.locator(".bar[data-kind=phase] .name").all_inner_texts()
        assert phases[0] == "Config"
        assert phases[-1] == "Pipeline probe"
        spans = "[...document.querySelectorAll('.bar[data-kind=node] i')].map(each => each.dataset.name)"
        assert {"start", "fetch"} <= set(page.evaluate(spans)) or {"start", "load"} <= set(page.evaluate(spans))
        assert "layers 0–" in page.locator(".stage[data-node=stage-0] .made").inner_text()

        # A request.
        match = serving.wait_for(r"Prompt RPC on ([\d.]+):(\d+)")
        address = (match[1], int(match[2]))
        answers: list[dict] = []
        asking = in_thread(lambda: answers.append(ask(address, "Count from one to a hundred.", 150, "counting")))
        page.wait_for_selector("#requests tr[data-state=running]", timeout=120_000)
        asking.join(120)
        assert answers[0]["kind"] == "Done"
        page.wait_for_selector("#requests tr[data-state=done]")
        assert "counting" in page.locator("#requests tr").first.inner_text()
        until(page, "document.querySelectorAll('#latency-chart circle').length === 2")
        until(page, "document.querySelector('.stage [role=meter]') !== null")
        # Nodes sample a second each, and not the same one: a request that takes less may lie between two samples.
        while not page.evaluate("/\\d/.test(document.querySelector('.stage[data-node=stage-1] .hop').textContent)"):
            ask(address, "Count from one to a hundred.", 150, "again")
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as metrics:
            assert re.search(rb"^myelin_\w+ [1-9]", metrics.read(), re.MULTILINE)

        # Logs, with a filter.
        page.keyboard.press("/")
        page.keyboard.type("listening")
        until(page, "document.querySelectorAll('#logs div').length === 2")
        page.locator("#logs-node").select_option("stage-1")
        until(page, "document.querySelectorAll('#logs div').length === 1")
        page.keyboard.press("Escape")
        page.locator("#logs-text").fill("")
        browser.picture(page, "real-serving")
        assert browser.barriers(page) == []

        # A node is killed, and replaced; a request that was under way goes on.
        asking = in_thread(lambda: answers.append(ask(address, "Count from one to a hundred.", 150, "interrupted")))
        page.wait_for_selector("#requests tr[data-state=running]", timeout=120_000)
        nodes = myelin.wait_for_nodes(2)
        nodes[-1].send_signal(signal.SIGKILL)
        until(page, "document.getElementById('run-state').textContent === 'recovering'")
        assert health(url) == (503, "recovering")
        browser.picture(page, "real-recovering")
        until(page, "document.getElementById('run-state').textContent === 'serving'", 120)
        assert health(url) == (200, "serving")
        asking.join(120)
        assert answers[1]["final_text"] == answers[0]["final_text"], "the client saw a pause, and nothing else"
        heads = " ".join(page.locator(".stage h3").all_inner_texts())
        assert "attempt 2" in heads
        assert "is replaced: attempt 2" in page.locator("#news").inner_text()
        browser.picture(page, "real-replaced")
        assert browser.barriers(page) == []

        # A phone, in the dark.
        phone = browser.open(f"{url}/dashboard", width=360, height=780, scheme="dark", is_mobile=True, has_touch=True)
        phone.wait_for_selector("#requests tr")
        assert sideways(phone) == 0
        assert browser.barriers(phone) == []
        browser.picture(phone, "real-phone")

        # The end, with both pages open.
        process.send_signal(signal.SIGINT)
        page.wait_for_selector("#connection[data-state=ended]", timeout=120_000)
        assert page.locator("#run-state").inner_text() == "ended"
        assert process.wait(60) == 0
        assert browser.complaints == []
    assert myelin.wait_until_gone(15) == []


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
