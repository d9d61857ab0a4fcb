"""The page in a real browser, over a run that is told rather than run: every state, theme and size of it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from browser_support import Browser, chromium, sideways, until
from scripted_page import Scripted, scripted_page

from myelin.orchestrator.events import NodeLog, NodeState
from myelin.serve.dashboard.state import RINGS, Snapshot, difference
from myelin.serve.request_book import RequestState
from myelin.values import NodeId

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("pictures")) as found:
        yield found


@pytest.fixture
def run() -> Iterator[Scripted]:
    with scripted_page() as scripted:
        yield scripted


@pytest.fixture(autouse=True)
def nothing_to_complain_about(browser: Browser) -> Iterator[None]:
    browser.complaints.clear()
    yield
    assert browser.complaints == []


def test_the_bootstrap_is_seen_as_it_happens(browser: Browser, run: Scripted) -> None:
    page = browser.open(f"{run.url}/dashboard")
    page.wait_for_selector("#connection[data-state=live]")
    assert page.locator("#run-state").inner_text() == "starting"
    run.until_loading(3, pace=0.02)
    page.wait_for_selector(".stage[data-node=stage-2][data-state=loading]")
    assert page.locator(".stage").count() == 3
    load = page.locator(".stage[data-node=stage-1] [role=progressbar]")
    assert load.get_attribute("aria-valuenow") == "60"
    assert "24.0" in load.get_attribute("aria-valuetext")
    names = page.locator(".bar[data-kind=phase] .name").all_inner_texts()
    assert names[:3] == ["Config", "Telemetry", "Run plan"]
    assert names[-1] == "Stage provision"
    assert page.locator(".bar[data-kind=phase][data-state=started]").count() == 1
    assert page.locator(".bar[data-kind=node]").count() == 3
    browser.picture(page, "bootstrap", whole=False)
    assert browser.barriers(page) == []
    run.progress(1, "load", 52_000_000, 52_000_000)
    for node in range(3):
        run.node(node, NodeState.LOADED)
    run.phase("serving", "started")
    page.wait_for_selector(".stage[data-node=stage-1][data-state=serving]")
    assert page.locator("#run-state").inner_text() == "serving"
    assert "it serves" in page.locator("#news").inner_text()


def test_requests_rates_and_latencies_are_seen(browser: Browser, run: Scripted) -> None:
    run.until_serving(2)
    page = browser.open(f"{run.url}/dashboard")
    run.answer(20, pace=0.01, label="first")
    run.answer(7, pace=0.01, label="going", end=False)
    waiting: list = []
    run.tell(lambda: waiting.append(run.book.arrived("prompt-rpc", "queued")))
    failing: list = []
    run.tell(lambda: failing.append(run.book.arrived("chat", "broken")))
    run.tell(lambda: failing[0].end(RequestState.FAILED, "prompt-too-long", "the prompt has 9 tokens"))
    page.wait_for_selector("tr[data-state=failed]")
    states = page.locator("#requests tr").evaluate_all("rows => rows.map(row => row.dataset.state)")
    assert states == ["failed", "waiting", "running", "done"]
    until(page, "document.getElementById('figure-rate').textContent !== '0'")
    page.wait_for_selector("#latency-chart circle.dot")
    assert "now" in page.locator("#rate-chart svg").get_attribute("aria-label")
    until(page, "document.getElementById('figure-requests').textContent === '1 running'")
    page.locator("#requests-filter").select_option("done")
    assert page.locator("#requests tr").count() == 1
    page.locator("#requests-filter").select_option("")
    for number in range(20):
        run.answer(2, label=f"more-{number}")
    until(page, "document.getElementById('requests-more').textContent === 'Show 12 more'")
    assert page.locator("#requests tr").count() == 12
    page.locator("#requests-more").click()
    assert page.locator("#requests tr").count() == 24
    page.wait_for_selector(".stage [role=meter]")
    assert page.locator("#spend").is_hidden(), "these nodes cost nothing"
    run.tell(lambda: run.feed.facts(dollars_per_hour=0.42, dollars=0.0123))
    until(page, "document.getElementById('figure-spend').textContent === '$0.0123'")
    assert page.locator("#figure-spend-sub").inner_text() == "$0.4200 an hour"
    browser.picture(page, "serving")


def test_a_node_that_is_lost_and_replaced_is_seen(browser: Browser, run: Scripted) -> None:
    run.until_serving(3)
    page = browser.open(f"{run.url}/dashboard")
    page.wait_for_selector(".stage[data-state=serving]")
    run.node(1, NodeState.LOST, detail="ended while it served (killed by signal 9)")
    run.phase("recovery", "started", detail="stage-1 was lost")
    page.wait_for_selector(".stage[data-node=stage-1][data-state=lost]")
    assert "killed by signal 9" in page.locator(".stage[data-node=stage-1] .detail").inner_text()
    assert page.locator("#run-state").inner_text() == "recovering"
    assert page.locator("#banner").is_visible()
    assert browser.barriers(page) == []
    run.node(1, NodeState.STARTING, 2)
    run.node(1, NodeState.LOADING, 2)
    run.progress(1, "fetch", 30_000_000, 40_000_000)
    page.wait_for_selector(".stage[data-node=stage-1][data-state=loading]")
    browser.picture(page, "recovering")
    run.node(1, NodeState.SERVING, 2)
    run.node(1, NodeState.REPLACED, 2, seconds=1.5)
    run.phase("recovery", "done", 1.6)
    page.wait_for_selector(".stage[data-node=stage-1][data-state=serving]")
    assert "attempt 2" in page.locator(".stage[data-node=stage-1] h3").inner_text()
    assert page.locator("#run-state").inner_text() == "serving"
    assert page.locator("#banner").is_hidden()
    assert "is replaced: attempt 2" in page.locator("#news").inner_text()
    assert page.locator(".group", has_text="Replacements").count() == 1


def test_logs_are_filtered_followed_and_read(browser: Browser, run: Scripted) -> None:
    run.until_serving(2)
    for number in range(60):
        run.log(number % 2, json.dumps({"event": f"step {number}", "level": "info", "rows": number}))
    run.log(0, "a plain <b>line</b>", "stdout")
    page = browser.open(f"{run.url}/dashboard")
    page.wait_for_selector("#logs div")
    assert page.locator("#logs b").count() == 0, "what nodes write is text"
    assert page.locator("#logs").get_by_text("a plain <b>line</b>").count() == 1
    assert page.evaluate("(() => { const e = document.getElementById('logs');"
                         " return e.scrollHeight - e.clientHeight - e.scrollTop; })()") < 4  # fmt: skip
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "logs-text"
    page.keyboard.type("STEP 17")
    until(page, "document.querySelectorAll('#logs div').length === 1")
    assert page.locator("#logs mark").inner_text() == "step 17"
    page.keyboard.press("Escape")
    until(page, "document.querySelectorAll('#logs div').length > 50")
    page.locator("#logs-stream").select_option("stdout")
    assert page.locator("#logs div").count() == 1
    page.locator("#logs-stream").select_option("")
    page.locator("#logs-node").select_option("stage-1")
    assert set(page.locator("#logs div").evaluate_all("rows => rows.map(row => row.dataset.node)")) == {"stage-1"}
    before = page.locator("#logs div").count()
    run.log(1, "one more")
    until(page, f"document.querySelectorAll('#logs div').length === {before + 1}")


def test_the_keyboard_alone_will_do(browser: Browser, run: Scripted) -> None:
    run.until_serving(2)
    page = browser.open(f"{run.url}/dashboard")
    page.wait_for_selector(".stage")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    for key, section in (("1", "chain"), ("2", "timeline"), ("3", "requests"), ("4", "logs")):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.id") == f"{section}-section"
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    assert browser.barriers(page) == []
    page.keyboard.press("Escape")
    assert page.locator("#help").is_hidden()
    assert page.locator("#logs-follow").is_checked()
    page.keyboard.press("f")
    assert not page.locator("#logs-follow").is_checked()
    page.keyboard.press("?")
    page.locator("#keys-on").uncheck()
    page.keyboard.press("Escape")
    page.keyboard.press("f")
    assert not page.locator("#logs-follow").is_checked(), "single keys are off"


def test_light_and_dark(browser: Browser, run: Scripted) -> None:
    run.until_serving(2)
    run.answer(12, pace=0.01)
    colours = []
    for scheme in ("light", "dark"):
        page = browser.open(f"{run.url}/dashboard", scheme=scheme)
        page.wait_for_selector("#latency-chart circle")
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert browser.barriers(page) == []
        browser.picture(page, scheme)
        page.keyboard.press("t")
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.reload()
        page.wait_for_selector(".stage")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == colours[-1], "it is remembered"
    assert colours[0] == colours[3] != colours[1] == colours[2]


@pytest.mark.parametrize("width", [360, 768])
def test_it_fits(browser: Browser, run: Scripted, width: int) -> None:
    run.until_serving(3)
    run.answer(12, label="a-rather-long-name-of-a-request-that-nobody-would-type")
    run.log(0, "x" * 600)
    run.node(1, NodeState.LOST, detail="y" * 300)
    page = browser.open(f"{run.url}/dashboard", width=width, height=780, is_mobile=width < 500, has_touch=True)
    page.wait_for_selector("#requests tr")
    assert sideways(page) == 0
    assert browser.barriers(page) == []
    browser.picture(page, f"width-{width}")


def test_less_motion_where_it_is_wished(browser: Browser, run: Scripted) -> None:
    run.until_loading(1)
    page = browser.open(f"{run.url}/dashboard", reduced_motion="reduce")
    page.wait_for_selector(".bar[data-state=started]")
    moving = "document.getAnimations().filter(each => each.playState === 'running').length"
    assert page.evaluate(moving) == 0
    page.emulate_media(reduced_motion="no-preference")
    until(page, f"{moving} > 0")


def test_a_page_finds_its_server_again(browser: Browser) -> None:
    with scripted_page() as first:
        port = int(first.url.rpartition(":")[2])
        first.until_serving(1)
        page = browser.open(f"{first.url}/dashboard")
        page.wait_for_selector(".stage")
        assert page.locator("#connection").inner_text() == "live"
    page.wait_for_selector("#connection[data-state=ended]")
    assert page.locator(".stage").count() == 1, "what was last known stays"
    with scripted_page(port=port) as second:
        second.until_serving(2)
        page.reload()
        until(page, "document.querySelectorAll('.stage').length === 2")


def test_a_page_signs_in(browser: Browser) -> None:
    with scripted_page("a token of some length") as run:
        run.until_serving(1)
        page = browser.open(f"{run.url}/dashboard")
        assert page.locator("h1").inner_text() == "Myelin"
        assert browser.barriers(page) == []
        browser.picture(page, "sign-in", whole=False)
        page.keyboard.type("a token of some length")
        page.keyboard.press("Enter")
        page.wait_for_selector(".stage[data-state=serving]")
        assert page.evaluate("document.cookie") == ""


def test_the_script_applies_increments_as_the_server_does(browser: Browser, run: Scripted) -> None:
    page = browser.open(f"{run.url}/dashboard")
    history = [Snapshot()]
    for number in range(RINGS["news"] + 30):
        snapshot = history[-1].add("news", [{"t": number, "text": str(number)}]).update("run", "run", tokens=number)
        snapshot = snapshot.put("requests", str(number), {"number": number})
        history.append(snapshot.drop("nodes", "a") if number % 3 else snapshot.put("nodes", "a", {"n": number}))
    places = [3, 4, 17, 100, len(history) - 1]
    increments = []
    shown = history[0]
    for place in places:
        increments.append(difference(shown, history[place]).as_json())
        shown = history[place]
    got = page.evaluate(
        """async ([state, increments]) => {
            const { apply } = await import("/dashboard/static/store.js");
            for (const increment of increments) apply(state, increment);
            return state;
        }""",
        [history[0].as_json(), increments],
    )
    assert got == history[-1].as_json()


def test_a_flood_does_not_hold_up_the_page(browser: Browser, run: Scripted) -> None:
    run.until_serving(2)
    page = browser.open(f"{run.url}/dashboard")
    page.wait_for_selector(".stage")
    began = time.monotonic()
    line = NodeLog(NodeId("stage-0"), "stdout", "one of very many lines")
    for _ in range(20):
        run.tell(*[lambda: run.feed.log(line)] * 1000)
    until(page, "document.getElementById('logs-count').textContent.includes('left out')")
    assert time.monotonic() - began < 60
    assert page.locator("#logs div").count() <= 400
