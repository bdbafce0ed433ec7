"""Reports in a real browser (headless Chromium): nothing runs, nothing is loaded, and it stays quick."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.reports.hostile import HOSTILE
from tests.reports.pages import hostile_page, long_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow
PHONE, DESK = (400, 800), (1400, 900)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium of the system, driven by playwright."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium: apt-get install chromium (or set CHROMIUM to one)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page that was opened: what it said and asked for."""

    def __init__(self, browser: Browser, path: Path, size: tuple[int, int], scheme: Any = "light") -> None:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        self.page: Page = context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        began = time.perf_counter()
        self.page.goto(path.as_uri())
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
        self.seconds = time.perf_counter() - began
        self.url = path.as_uri()


@pytest.mark.parametrize("size", [PHONE, DESK])
def test_hostile_texts(browser: Browser, tmp_path: Path, size: tuple[int, int]) -> None:
    """No message on the console, no request but the page, no script has run, also after every part was unfolded."""
    opened = Opened(browser, hostile_page(tmp_path / "run"), size)
    page = opened.page
    page.evaluate("() => document.querySelectorAll('details').forEach(part => part.open = true)")
    page.mouse.move(200, 200)
    page.keyboard.press("Tab")
    page.screenshot()
    assert opened.said == []
    assert [url for url in opened.asked if not url.startswith("data:image/png")] == [opened.url]
    assert page.title().startswith("</script>")
    assert page.evaluate("() => document.scripts.length + document.forms.length + document.embeds.length") == 0
    assert page.evaluate("() => document.querySelectorAll('iframe, object, svg, link, base, input, video').length") == 0
    wide = page.evaluate("() => document.documentElement.scrollWidth")
    assert wide <= size[0]
    text = page.evaluate("() => document.body.textContent")
    assert HOSTILE[-1] in text.replace("\n", "")
    for hostile in HOSTILE[:30]:
        assert hostile in text


@pytest.mark.parametrize(("size", "scheme"), [(PHONE, "dark"), (DESK, "light")])
def test_how_it_looks(browser: Browser, tmp_path: Path, size: tuple[int, int], scheme: str) -> None:
    """Nothing is wider than the screen, texts have contrast in both schemes, and the first answer is on the first screens."""
    opened = Opened(browser, long_page(tmp_path / "run", 128), size, scheme)
    page = opened.page
    assert page.evaluate("() => document.documentElement.scrollWidth") <= size[0]
    page.screenshot(path=tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    colours = page.evaluate(
        "() => [getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        ".map(c => c.match(/[0-9]+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0))"
    )
    assert (colours[0] > colours[1] + 400) if scheme == "dark" else (colours[1] > colours[0] + 400)
    first = page.locator(".assistant").first.bounding_box()
    assert first is not None
    assert first["y"] < 2 * size[1]
    assert first["width"] > 0.7 * min(size[0], 1100)
    assert opened.said == []


def test_the_keyboard_reaches_groups(browser: Browser, tmp_path: Path) -> None:
    """Tab to a link of the contents, Enter: the group is unfolded and on the screen; Space on a heading folds it."""
    page = Opened(browser, long_page(tmp_path / "run", 128), DESK).page
    for _ in range(3):
        page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent").startswith("Group 2")
    page.keyboard.press("Enter")
    group = page.locator("#s2")
    assert group.is_visible()
    box = group.bounding_box()
    assert box is not None
    assert 0 <= box["y"] < 900
    page.locator("summary", has=page.locator("h2", has_text="Group 2")).focus()
    page.keyboard.press("Space")
    assert not group.is_visible()


@pytest.mark.parametrize("messages", [2_000, 10_000])
def test_many_messages(browser: Browser, tmp_path: Path, messages: int) -> None:
    """All of them are there; a click on the last group shows it."""
    opened = Opened(browser, long_page(tmp_path / "run", messages), DESK)
    page = opened.page
    count = page.evaluate("() => document.querySelectorAll('.m').length")
    assert count >= messages
    page.locator("nav a").nth(7).click()
    assert page.locator("#s7 .assistant").first.is_visible()
    print(f"{messages} messages: loaded and drawn in {opened.seconds:.2f} s")


def test_a_link_opens_a_group(browser: Browser, tmp_path: Path) -> None:
    """``report.html#s3``, as somebody sends it: the fourth group is unfolded."""
    path = long_page(tmp_path / "run", 128)
    page = browser.new_page()
    page.goto(f"{path.as_uri()}#s3")
    assert page.locator("#s3").is_visible()
