"""Which pages of a document are meant: "2", "1-3,7", "5-"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from preprocess.types import ImageError

MAX_CHARS = 256
_SPAN = re.compile(r"(\d{1,6})(-(\d{1,6})?)?")
ACCEPTED = "pages are counted from 1 and written as 2 or 1-3,7 or 5-"


@dataclass(frozen=True, slots=True)
class PageRange:
    """`spans`: (first, last) from 1, both within; None: to the end."""

    spans: tuple[tuple[int, int | None], ...]

    @classmethod
    def parse(cls, text: str) -> PageRange:
        """Raises ValueError, which says what is accepted."""
        if len(text) > MAX_CHARS:
            raise ValueError(ACCEPTED)
        spans: list[tuple[int, int | None]] = []
        for part in text.split(","):
            found = _SPAN.fullmatch(part.strip())
            if found is None:
                raise ValueError(ACCEPTED)
            first = int(found[1])
            last = first if found[2] is None else None if found[3] is None else int(found[3])
            if first < 1 or (last is not None and last < first):
                raise ValueError(ACCEPTED)
            spans.append((first, last))
        return cls(tuple(spans))

    def of(self, count: int, most: int) -> list[int]:
        """Of a document of `count` pages, counted from 0, in the order that was asked for; each once.

        Raises ImageError `image_page_not_found`, and `too_many_images` for more than `most`.
        """
        chosen: dict[int, None] = {}
        for first, last in self.spans:
            if first > count or (last is not None and last > count):
                raise ImageError("image_page_not_found", f"The document has {_pages(count)}.")
            chosen.update(dict.fromkeys(range(first - 1, count if last is None else last)))
        if len(chosen) > most:
            raise ImageError(
                "too_many_images",
                f"{_pages(len(chosen)).capitalize()} of a document of {count} are asked for, and "
                f"{most} more images are accepted: choose with 'pages', for example 1-{max(1, most)}.",
            )
        return list(chosen)


ALL = PageRange(((1, None),))


def _pages(count: int) -> str:
    return f"{count} page" if count == 1 else f"{count} pages"
