"""The playground in headless Chromium, with an engine that answers at once and a model of many tiles."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fake_engine_client
import pytest
from browser import CHROMIUM, Page, browser, needs_chromium
from fake_engine_client import FakeEngine, LiveServer, live_server, model_spec
from PIL import Image
from small_servers import prefix_proxy

from preprocess.stage import PreprocessSpec
from preprocess.tiling import Idefics3Tiling
from vlm.api.guard.auth import KeyRing
from vlm.api.guard.keys import ApiKey
from vlm.config import ServeConfig

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    spec = replace(model_spec(), preprocess=PreprocessSpec(Idefics3Tiling(128, 512)))
    monkeypatch.setattr(fake_engine_client, "_SPECS", [spec])
    with live_server(FakeEngine(token_delay_s=0.01)) as running:
        yield running


@pytest.fixture
def page(server: LiveServer) -> Iterator[Page]:
    assert CHROMIUM is not None
    with browser(CHROMIUM) as opened:
        opened.resize(1280, 900)
        opened.go(server.url)
        opened.wait("document.getElementById('model')?.textContent === 'vlm-default'")
        yield opened


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    Image.radial_gradient("L").resize((400, 300)).convert("RGB").save(path)
    return path


DONE = "document.querySelectorAll('#log li').length === %d && !document.querySelector('.busy')"


def ask(page: Page, question: str, count: int) -> None:
    page.js("document.getElementById('question').focus()")
    page.type(question)
    page.press("Enter", 13)
    page.wait(DONE % count)


@needs_chromium
def test_an_image_is_shown_in_tiles_and_answers_stream_in(
    page: Page, picture: Path, server: LiveServer
) -> None:
    page.choose_file("#file", picture)
    page.wait("document.querySelectorAll('#tiles .tile').length === 12")
    assert "3 × 4 tiles of 16 visual tokens" in page.js("document.getElementById('tiles-title').textContent")
    assert page.js("document.getElementById('fact-tokens').textContent") == str(13 * 16)
    assert set(page.js("[...document.querySelectorAll('.tile-label')].map(t => t.textContent)")) == {"16"}
    # the overlay covers the picture, to the pixel
    boxes = page.js(
        "['image', 'tiles'].map(i => { const r = document.getElementById(i).getBoundingClientRect();"
        " return [r.left, r.top, r.width, r.height] })"
    )
    assert boxes[0] == pytest.approx(boxes[1], abs=1.0)
    ask(page, "What is it?", 1)
    assert page.js("document.querySelector('#log .a').textContent") == "I saw 1 images in 13 tiles."
    assert "cold" in page.js("document.querySelector('#log li:last-child .m').textContent")
    ask(page, "And what else?", 2)
    last = page.js("document.querySelector('#log li:last-child .m').textContent")
    assert "warm" in last and "208 visual" in last
    assert page.js("document.getElementById('warm').textContent") != "–"
    assert server.engine.num_wants == 1
    assert page.problems() == []
    assert page.hosts() == {server.url.removeprefix("http://")}


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_overflows_at_either_width(page: Page, picture: Path, width: int, tmp_path: Path) -> None:
    page.choose_file("#file", picture)
    page.wait("document.querySelectorAll('#tiles .tile').length === 12")
    ask(page, "A" * 120 + "?", 1)
    page.resize(width, 844)
    page.wait(f"window.innerWidth === {width}")
    page.wait(f"document.documentElement.scrollWidth <= {width}")  # once the tiles have followed the image
    shot = tmp_path / "shot.png"
    page.screenshot(shot)
    with Image.open(io.BytesIO(shot.read_bytes())) as image:
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 50


@needs_chromium
def test_everything_is_reachable_by_keyboard(page: Page, picture: Path) -> None:
    page.choose_file("#file", picture)
    page.wait("document.activeElement.id === 'question'")
    seen = []
    for _ in range(6):
        page.press("Tab", 9)
        seen.append(page.js("document.activeElement.id"))
        outline = page.js(
            "getComputedStyle(document.activeElement.id === 'file' ? document.getElementById('pick')"
            " : document.activeElement).outlineStyle"
        )
        assert outline != "none" or seen[-1] in ("", "show-tiles"), seen
    assert [name for name in seen if name] == ["send", "file", "detail", "show-tiles", "question"]
    unnamed = page.js(
        "[...document.querySelectorAll('input, textarea, select, button')].filter("
        "e => !e.labels?.length && !e.textContent.trim()).map(e => e.id)"
    )
    assert unnamed == []


@needs_chromium
def test_errors_are_told_and_leave_the_page_usable(page: Page, picture: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.png"
    wrong.write_bytes(b"not an image")
    page.choose_file("#file", wrong)
    page.wait("!document.getElementById('error').hidden")
    assert "not supported" in page.js("document.getElementById('error').textContent")
    page.choose_file("#file", picture)
    page.wait("document.getElementById('error').hidden && !document.getElementById('send').disabled")


@needs_chromium
def test_an_image_the_server_forgot_is_sent_again(page: Page, picture: Path, server: LiveServer) -> None:
    page.choose_file("#file", picture)
    page.wait("!document.getElementById('send').disabled && document.getElementById('fact-kv').textContent")
    server.service.images._entries.clear()
    ask(page, "Still there?", 1)
    assert "13 tiles" in page.js("document.querySelector('#log .a').textContent")


@needs_chromium
@pytest.mark.parametrize(
    ("root_path", "strips", "slash"), [("", True, "/"), ("/a/vlm", True, "/"), ("/a/vlm", False, "")]
)
def test_the_page_works_under_a_path_of_a_proxy(
    root_path: str, strips: bool, slash: str, picture: Path
) -> None:
    """Whether the proxy cuts the path off or not; told of the path, the server takes both."""
    assert CHROMIUM is not None
    config = ServeConfig(root_path=root_path)
    with (
        live_server(FakeEngine(), config) as running,
        prefix_proxy(running.url, "/a/vlm", strips=strips) as url,
        browser(CHROMIUM) as page,
    ):
        page.go(f"{url}/a/vlm{slash}")
        page.wait("document.getElementById('model')?.textContent === 'vlm-default'")
        page.wait("document.getElementById('light').className.includes('ready')")
        page.choose_file("#file", picture)
        page.wait(
            "!document.getElementById('send').disabled && document.getElementById('fact-kv').textContent"
        )
        ask(page, "What is it?", 1)
        assert page.js("document.querySelector('#log .a').textContent").startswith("I saw 1 images")
        assert page.js("getComputedStyle(document.getElementById('drop')).borderStyle") != "none"  # the style
        assert page.problems() == []
        assert page.hosts() == {url.removeprefix("http://")}


@needs_chromium
def test_a_key_is_asked_for_when_the_server_wants_one() -> None:
    import hashlib

    assert CHROMIUM is not None
    keys = KeyRing([ApiKey("a", hashlib.sha256(b"secret").hexdigest(), "a")])
    with live_server(keys=keys) as running, browser(CHROMIUM) as page:
        page.go(running.url)
        page.wait("document.getElementById('key-form') && !document.getElementById('key-form').hidden")
        page.js("document.getElementById('key').focus()")
        page.type("secret")
        page.press("Enter", 13)
        page.wait("document.getElementById('model').textContent === 'vlm-default'")
        assert page.js("document.getElementById('key-form').hidden") is True
