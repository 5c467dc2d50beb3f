"""One process that draws PDF pages: `python -m workers.children.page_process --limits JSON --fd N`.

pdfium is native code, so a hostile file must be able to hang or kill only this process.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from preprocess.pages import PageLimits, PdfPages
from preprocess.process_memory import steady_memory
from preprocess.types import ImageError
from workers.children.frames import FrameSocket, frames_of_parent
from workers.children.process_limits import forbid_writing, limit_cpu, limit_memory, unlimit_cpu


def serve(frames: FrameSocket, limits: PageLimits) -> None:
    """Answers until the parent closes its end; raises EOFError then. A request is {"page": int | null}, with
    the document's path as payload; its answer has the page's PNG, or how many pages there are."""
    held: dict[str, PdfPages] = {}
    frames.send({"op": "ready"})
    while True:
        request = frames.receive()
        limit_cpu(limits.page_cpu_s)
        frames.send(*answer(os.fsdecode(request.payload), request.header["page"], held, limits))
        unlimit_cpu()


def answer(
    path: str, page: int | None, held: dict[str, PdfPages], limits: PageLimits
) -> tuple[dict[str, Any], bytes]:
    """`held` keeps the last document open, since its pages come one after another."""
    try:
        if path not in held:
            for other in held.values():
                other.close()
            held.clear()
            held[path] = PdfPages(path, limits)
        if page is None:
            return {"count": held[path].count}, b""
        drawn = held[path].render(page)
        return {"lacks_text": drawn.lacks_text}, drawn.png
    except ImageError as error:
        return {"code": error.code, "message": error.message}, b""
    except OSError:
        return {"code": "unreadable_file", "message": "The file can't be read."}, b""
    except MemoryError:
        return {"code": "page_too_complex", "message": "The page needs too much memory to draw."}, b""
    except Exception:  # of a file made by strangers; the process goes on to the next one
        return {"code": "page_crashed", "message": "The page could not be drawn."}, b""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--limits", type=json.loads, required=True)
    parser.add_argument("--fd", type=int, required=True)
    options = parser.parse_args()
    limits = PageLimits(**options.limits)
    limit_memory(total_bytes=limits.memory_mb << 20)
    forbid_writing()
    steady_memory()
    with frames_of_parent(options.fd) as frames:
        serve(frames, limits)


if __name__ == "__main__":
    main()
