"""DocTags, which Granite-Docling and SmolDocling answer in, as Markdown: by docling-core, an extra."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

log = logging.getLogger(__name__)


def is_doctags(text: str) -> bool:
    return text.lstrip().startswith("<doctag>")


def to_markdown(doctags: str) -> str:
    """One page's Markdown; "" where docling-core is not installed or can make nothing of the page."""
    if not _is_installed():
        return ""
    from docling_core.types.doc.document import DoclingDocument, DocTagsDocument

    try:
        pages = DocTagsDocument.from_doctags_and_image_pairs([doctags], None)
        document = DoclingDocument.load_from_doctags(pages, document_name="page")
        return str(document.export_to_markdown()).strip()
    except Exception:  # of whatever kind: the tags are a model's, and may be cut off anywhere
        log.warning("docling-core can't read a page's DocTags, which are shown as they are", exc_info=True)
        return ""


@cache
def _is_installed() -> bool:
    """Says once where it is not."""
    if find_spec("docling_core") is not None:
        return True
    log.warning(
        "DocTags are shown as they are: turning them into Markdown needs docling-core, not installed here: "
        "pip install 'vlm-serve[docling]'"
    )
    return False
