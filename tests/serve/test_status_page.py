"""The page at /: in Chromium it shows what happens, and every second again; nothing is loaded from elsewhere."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from browser import MISSING, Browser, executable
from deltune.serve.api.tenants import add_key

from .served import METHODS, Served, served

WIDTHS = (320, 768, 1400)
OVERFLOWS = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
needs_browser = pytest.mark.skipif(executable() is None, reason=MISSING)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


def visit(browser: Browser, url: str, width: int = 1200) -> None:
    """Open a page of a server, and wait for what it asks the server for."""
    browser.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
    browser.events.clear()
    browser.send("Page.navigate", url=url)
    until(
        browser,
        "document.readyState == 'complete' && document.getElementById('state').textContent != 'waiting for the server'",
    )


def until(browser: Browser, condition: str, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not browser.ask(condition):
        assert time.monotonic() < end, (condition, browser.ask("document.body.innerText"))
        time.sleep(0.1)


def cells(browser: Browser) -> list[list[str]]:
    in_rows = "[...document.querySelectorAll('#deltas tbody tr')]"
    rows: list[list[str]] = browser.ask(f"{in_rows}.map((row) => [...row.cells].map((cell) => cell.textContent))")
    return rows


def test_the_page_is_whole_and_loads_nothing(server: Served) -> None:
    answer = server.get("/")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert not re.search(r"https?:(?!//www\.w3\.org/2000/svg)|url\(|@import", answer.text)
    links: list[str | None] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert not {"src", "action"} & {name for name, _ in attrs}, (tag, attrs)
            links.extend(value for name, value in attrs if name == "href" and tag == "a")
            assert tag == "a" or "href" not in dict(attrs), (tag, attrs)

    Reader().feed(answer.text)
    assert links == ["v1/deltas", "metrics"], "from the page, which may lie below a path of a proxy"
    assert all(server.get(f"/{link}").status_code == 200 for link in links)


@needs_browser
def test_without_scripts_the_page_says_where_the_same_is(server: Served, browser: Browser) -> None:
    shown = "document.querySelector('noscript p')?.innerText ?? ''"
    browser.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.send("Page.navigate", url=f"{server.url}/")
        until(browser, "document.readyState == 'complete' && document.querySelector('noscript p') != null")
        assert "/v1/deltas" in browser.ask(shown) and "/metrics" in browser.ask(shown)
        assert browser.ask("document.querySelector('noscript p').offsetHeight") > 0
    finally:
        browser.send("Emulation.setScriptExecutionDisabled", value=False)
    visit(browser, f"{server.url}/")
    assert browser.ask(shown) == ""


@needs_browser
def test_the_page_shows_what_happens(server: Served, browser: Browser) -> None:
    for name in ("mood", "intent", "base"):
        server.post("/v1/completions", {"model": name, "prompt": "the old hammer", "max_tokens": 3})
    server.post("/v1/completions", {"model": "mood", "prompt": ""})
    visit(browser, f"{server.url}/")
    until(browser, f"document.querySelectorAll('#deltas tbody tr').length == {1 + len(METHODS)}")
    rows = {row[0]: row for row in cells(browser)}
    loads = server.service.metrics.loads
    assert set(rows) == {"base", *METHODS}
    assert int(rows["mood"][3]) == loads["mood"].requests and int(rows["mood"][4]) == loads["mood"].errors >= 1
    assert float(rows["mood"][5]) > 0 and rows["intent"][1].startswith("prefix")
    assert browser.ask("document.getElementById('state').textContent") == "serving"
    for chart in ("requests", "tokens", "latency"):
        assert "L" in browser.ask(f"document.querySelector('#{chart} path').getAttribute('d')") or chart == "latency"
    facts = browser.ask("document.getElementById('now').innerText")
    assert "tokens generated" in facts and "base" in facts
    before = int(rows["base"][3])
    server.post("/v1/completions", {"model": "base", "prompt": "the", "max_tokens": 1})
    end = time.monotonic() + 30
    while int({row[0]: row for row in cells(browser)}["base"][3]) != before + 1:
        assert time.monotonic() < end
        time.sleep(0.1)


@needs_browser
def test_the_page_says_what_was_refused_and_why(decoder: tuple[Path, Path], tmp_path: Path, browser: Browser) -> None:
    """New files of a delta whose old version goes on, files that never were good, and a folder without a delta."""
    model, deltas = decoder
    shutil.copytree(deltas, tmp_path / "deltas")
    (tmp_path / "deltas" / "notes").mkdir()
    options: dict[str, Any] = {"model": str(model), "deltas": str(tmp_path / "deltas"), "served_name": "base"}
    with served(**options) as running:
        body = {"model": "mood", "prompt": "the", "max_tokens": 1}
        assert running.post("/v1/completions", body).status_code == 200
        visit(browser, f"{running.url}/")
        reasons = "[...document.querySelectorAll('#reasons > div')].map((row) => row.innerText)"
        until(browser, f"{reasons}.length == 1")
        for name in ("mood", "intent"):
            (tmp_path / "deltas" / name / "delta.json").write_text("{}")
        running.engine.refresh()
        until(browser, f"{reasons}.length == 3")
        shown = {text.partition("\n")[0]: text for text in browser.ask(reasons)}
        assert "the old version goes on" in shown["mood"] and "is not as deltune writes it" in shown["mood"]
        assert "the old version" not in shown["intent"] and "is not as deltune writes it" in shown["intent"]
        assert "holds no delta" in shown["notes"] and str(tmp_path) not in str(shown)
        names = {row[0] for row in cells(browser)}
        assert {"mood (newest files refused)", "intent (refused)"} <= names
        assert running.post("/v1/completions", body).status_code == 200
        for name in ("mood", "intent"):
            shutil.copy(deltas / name / "delta.json", tmp_path / "deltas" / name / "delta.json")
        (tmp_path / "deltas" / "notes").rmdir()
        running.engine.refresh()
        until(browser, "document.getElementById('refusals').hidden")


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits(server: Served, browser: Browser, width: int) -> None:
    visit(browser, f"{server.url}/", width)
    until(browser, "document.querySelectorAll('#deltas tbody tr').length > 1")
    assert not browser.ask(OVERFLOWS)
    wrong = [event for event in browser.events if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")]
    assert wrong == []


@needs_browser
def test_names_are_text_and_keys_are_asked_for(decoder: tuple[Path, Path], tmp_path: Path, browser: Browser) -> None:
    """A name with markup is shown as it is; with keys the page has no numbers until it has the key of an admin."""
    file = tmp_path / "keys.json"
    admin, user = add_key(file, "boss", {"deltas": ("*",), "admin": True}), add_key(file, "acme", {"deltas": ("*",)})
    evil = "<img src=x onerror=alert(1)>"
    options: dict[str, Any] = {"model": str(decoder[0]), "deltas": str(decoder[1]), "served_name": evil}
    with served(**options, keys=str(file)) as running:
        visit(browser, f"{running.url}/")
        assert "no API key" in browser.ask("document.getElementById('state').textContent") and cells(browser) == []
        for key, words in ((user, "may not see the numbers"), (admin, "serving")):
            browser.ask(f"document.getElementById('key').value = {key!r}")
            browser.ask("document.querySelector('#form button').click()")
            until(browser, f"document.getElementById('state').textContent.includes({words!r})")
        until(browser, "document.querySelectorAll('#deltas tbody tr').length > 1")
        assert evil in [row[0] for row in cells(browser)] and browser.ask("document.images.length") == 0
        browser.ask("sessionStorage.clear()")


def test_the_page_can_be_left_out(decoder: tuple[Path, Path]) -> None:
    with served(model=str(decoder[0]), page=False) as running:
        assert running.get("/").status_code == 404
