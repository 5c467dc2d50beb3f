"""What the kernel holds a child process to that reads strangers' documents and grammars."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from test_pages import pdf, raw_pdf

from llm.constraints.constrain import Grammars
from preprocess.pages import PageLimits
from preprocess.types import ImageError
from workers.children.grammar_process import GrammarProcess
from workers.local.page_drawing import PageRenderer


@pytest.fixture
def children() -> Iterator[set[int]]:
    """Ids of the processes that were there before."""
    yield {child.pid for child in psutil.Process().children(recursive=True)}


def memory_limit(before: set[int]) -> int:
    """Bytes of address space that the one new child may have."""
    (child,) = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    soft, hard = child.rlimit(resource.RLIMIT_AS)
    assert soft == hard  # nothing in the child can raise it
    assert child.rlimit(resource.RLIMIT_CORE) == (0, 0)
    return int(soft)


def test_a_process_that_draws_pdf_pages_has_the_memory_it_may_use(tmp_path: Path, children: set[int]) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(pdf([1]))

    async def run() -> int:
        renderer = PageRenderer(PageLimits(memory_mb=1_000))
        try:
            await renderer.render(str(path), 0)
            return memory_limit(children)
        finally:
            await renderer.close()

    assert asyncio.run(run()) == 1_000 << 20


@pytest.mark.slow
def test_a_page_that_needs_more_memory_than_that_is_refused(tmp_path: Path) -> None:
    """Both draw 480 megabytes of pixels; one may hold them."""
    path = tmp_path / "a.pdf"
    path.write_bytes(raw_pdf("0 0 9 9 re f", media_box="0 0 12000 10000"))

    async def run(memory_mb: int) -> str:
        limits = PageLimits(dpi=72, max_pixels=120_000_000, memory_mb=memory_mb)
        renderer = PageRenderer(limits)
        try:
            await renderer.count(str(path))
            await renderer.render(str(path), 0)
            return "fine"
        except ImageError as error:
            return error.code
        finally:
            await renderer.close()

    assert asyncio.run(run(700)) in ("page_too_complex", "page_crashed", "invalid_page")
    assert asyncio.run(run(4_000)) == "fine"


def test_a_process_that_compiles_grammars_has_the_memory_it_may_use(children: set[int]) -> None:
    grammars = Grammars(
        (*(bytes([i]) for i in range(256)), b"</s>"), frozenset({256}), 257, check=GrammarProcess
    )
    try:
        grammars.compile("regex", "a").result()
        assert memory_limit(children) == 2 << 30
    finally:
        grammars.close()


def test_a_page_that_draws_for_long_ends_by_its_processor_time(tmp_path: Path) -> None:
    """Some eight seconds of drawing, and a wall deadline far away: only the timer can end the page."""
    path = tmp_path / "slow.pdf"
    path.write_bytes(raw_pdf("0 0 m 100 0 100 100 0 100 c f\n" * 30_000))

    async def run() -> str:
        renderer = PageRenderer(PageLimits(dpi=300, page_cpu_s=1, page_deadline_s=100))
        try:
            with pytest.raises(ImageError) as caught:
                await renderer.render(str(path), 0)
            return caught.value.code
        finally:
            await renderer.close()

    assert asyncio.run(run()) == "page_timeout"
