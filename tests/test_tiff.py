"""TIFF directories: which are pages, and what a stranger may write into them."""

from __future__ import annotations

import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from caption_fakes import page_image
from tiff_files import LONG, SHORT, Page, gray, old_jpeg, strips, tiff_file

from preprocess.decode import decode
from preprocess.formats.tiff import page_offsets
from preprocess.formats.tiff_page import page_file
from preprocess.probe import probe
from preprocess.types import ImageError


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(decode(data))


def split(data: bytes) -> list[bytes]:
    return [page_file(data, offset, 1 << 30) for offset in page_offsets(data, 100)]


@pytest.mark.parametrize("whole", [True, False])
def test_pages_in_old_style_jpeg_keep_their_stream_or_their_tables(whole: bool) -> None:
    images = [page_image(number).resize((96, 80)) for number in (1, 2)]
    data = tiff_file(*(old_jpeg(image, whole) for image in images))
    pages = split(data)
    assert len(pages) == 2
    for index, page in enumerate(pages):
        assert np.abs(pixels(page).astype(int) - np.asarray(images[index], int)).mean() < 12


def test_the_length_of_an_old_style_jpeg_may_be_left_out() -> None:
    page = old_jpeg(page_image(1).resize((96, 80)), whole=True)
    short = Page({tag: value for tag, value in page.tags.items() if tag != 514}, page.pieces)
    assert np.array_equal(pixels(split(tiff_file(short))[0]), pixels(tiff_file(page)))


@pytest.mark.parametrize(("tag", "value"), [(254, 1), (254, 5), (254, 4), (255, 2)])
@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
def test_smaller_versions_and_masks_are_no_pages(tag: int, value: int, big: bool, order: str) -> None:
    smaller, first = gray(3, 2, {tag: (SHORT, [value])}), gray(30, 20, {254: (LONG, [0])}, value=200)
    second = gray(20, 10, {254: (LONG, [2])}, value=100)
    data = tiff_file(smaller, first, smaller, second, smaller, order=order, big=big)
    assert probe(data).num_pages == 2
    for index, (size, level) in enumerate((((30, 20), 200), ((20, 10), 100))):
        page = split(data)[index]
        info = probe(page)
        assert (info.width, info.height) == size
        assert (pixels(page) == level).all()


def test_a_file_of_smaller_versions_alone_has_them_as_pages() -> None:
    """As camera files have, whose picture stands elsewhere."""
    assert probe(tiff_file(gray(3, 2, {254: (LONG, [1])}))).width == 3


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("number", [2**64 - 2, 2**63, 2**63 - 1, 2**32 - 2, 2**31])
def test_offsets_and_counts_beyond_the_file_are_damage(number: int, big: bool) -> None:
    whole = tiff_file(gray(8, 8), big=big)
    offset, count, entry_bytes = ("<Q", "<Q", 20) if big else ("<I", "<H", 12)
    first_at = 8 if big else 4
    (directory,) = struct.unpack_from(offset, whole, first_at)
    entry = directory + struct.calcsize(count)
    next_at = entry + 9 * entry_bytes
    value_at = entry + entry_bytes - struct.calcsize(offset)  # the width
    for form, at in ((offset, first_at), (count, directory), (offset, entry + 4), (offset, value_at)):
        data = bytearray(whole)
        struct.pack_into(form, data, at, number % 256 ** struct.calcsize(form))
        for read in (probe, decode, lambda data: [decode(page) for page in split(data)]):
            with pytest.raises(ImageError):
                read(bytes(data))
    data = bytearray(whole)
    struct.pack_into(offset, data, next_at, number % 256 ** struct.calcsize(offset))
    for read in (probe, decode, lambda data: [decode(page) for page in split(data)]):
        if big and number >= 2**63:  # the offset of no file
            with pytest.raises(ImageError):
                read(bytes(data))
        else:  # a file that was cut
            read(bytes(data))


def test_counts_that_no_page_has_are_refused_before_they_cost_anything() -> None:
    numbers = (SHORT, [8] * 4_000_000)
    strip = {273: numbers, 279: numbers}
    for more in ({258: numbers}, {320: numbers}, strip):
        page = gray(8, 8)
        data = tiff_file(Page({**page.tags, **more}, {} if more is strip else page.pieces))
        tracemalloc.start()
        with pytest.raises(ImageError) as caught:
            probe(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert caught.value.code == "invalid_image" and peak < 4 << 20


def test_a_huge_tile_is_refused_and_any_number_of_rows_means_all() -> None:
    tile = {322: (LONG, [1 << 20]), 323: (LONG, [1 << 20]), 324: (LONG, [8]), 325: (LONG, [64])}
    with pytest.raises(ImageError):
        probe(tiff_file(gray(8, 8, tile)))
    tags = {**gray(8, 8).tags, 258: (SHORT, [8, 8, 8]), 259: (SHORT, [8]), 277: (SHORT, [3])}
    tags |= {262: (SHORT, [6])}
    strip = zlib.compress(np.repeat(np.arange(64, dtype=np.uint8), 3).tobytes())
    seen = []
    for rows in (8, 9, 2**31 - 1, 2**32 - 1):
        page = strips({**tags, 278: (LONG, [rows]), 530: (SHORT, [1, 1])}, [strip])
        seen.append(pixels(tiff_file(page)))
    assert all(np.array_equal(seen[0], other) for other in seen)


def test_a_compression_that_is_not_read_is_said_to_be_so() -> None:
    with pytest.raises(ImageError) as caught:
        probe(tiff_file(gray(8, 8, {259: (SHORT, [50001])})))
    assert caught.value.code == "unsupported_image_format" and "compression" in caught.value.message
