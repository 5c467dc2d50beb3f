"""Where the `vlm` command begins: before anything else is imported, which takes a moment."""

from __future__ import annotations

import os
import signal


def main() -> None:
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # else it is ignored, as whoever starts us wants
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _open_standard_files()
    from vlm.cli.main import main as run

    signal.signal(signal.SIGINT, handler)
    run()


def _open_standard_files() -> None:
    """Whoever starts us may have closed one: the next file opened would take its number, and what a library
    prints there would go into that file."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


if __name__ == "__main__":
    main()
