"""A process that compiles each new constraint first: one that hangs, crashes or eats memory ends there.

`python -m workers.children.grammar_process --fd N`. It imports no more of ours than it needs: no numpy.
"""

from __future__ import annotations

import argparse
import json
import threading
import weakref

from llm.constraints.grammar import Compiler, GrammarDeadline, GrammarError, GrammarLimits, check_text
from workers.children.child import Child, module_command
from workers.children.frames import FrameSocket, frames_of_parent
from workers.children.process_limits import limit_memory

_MEMORY_BYTES = 2 << 30  # of address space
_STACK_BYTES = 2 << 20  # a quarter of what the engine's threads have: what fits here fits there
_START_S = 60.0
_TOO_COMPLEX = "The constraint is too complex."


class GrammarProcess:
    """`GrammarCheck` in a child. Starts it when first asked, and again after it was ended. One caller at a
    time."""

    def __init__(self, vocabulary: tuple[bytes, ...], eos_ids: frozenset[int], limits: GrammarLimits) -> None:
        tokens = {"tokens": [token.hex() for token in vocabulary], "eos_ids": sorted(eos_ids)}
        self._setup = json.dumps(tokens).encode()
        self._limits = limits
        self.child: Child | None = None
        self.num_started = 0

    def check(self, kind: str, text: str) -> None:
        """Raises GrammarError if the text does not compile within the deadline; OSError if the process
        can't be started."""
        child = self.child or self._start()
        try:
            refusal = _ask(child, kind, text.encode("utf-8", "surrogatepass"), self._limits.deadline_s)
        except (TimeoutError, EOFError, OSError) as error:
            self.close()
            kind_of_error = GrammarDeadline if isinstance(error, TimeoutError) else GrammarError
            raise kind_of_error(_TOO_COMPLEX) from None
        if refusal:
            raise GrammarError(refusal)

    def close(self) -> None:
        if self.child is not None:
            self._end()
        self.child = None

    def _start(self) -> Child:
        self.child = Child(
            module_command("workers.children.grammar_process"), is_quiet=True, is_blocking=True
        )
        self._end = weakref.finalize(self, self.child.kill)
        self.num_started += 1
        try:
            _ask(self.child, "", self._setup, _START_S)
        except (TimeoutError, EOFError) as error:
            self.close()
            raise OSError("the process that compiles grammars does not start") from error
        return self.child


def _ask(child: Child, kind: str, payload: bytes, timeout_s: float) -> str:
    """Why it is refused, if it is. Raises TimeoutError, EOFError and OSError."""
    child.socket.settimeout(timeout_s)
    frames = FrameSocket(child.socket)
    frames.send({"kind": kind}, payload)
    return str(frames.receive().header["refusal"])


def serve(frames: FrameSocket) -> None:
    """The vocabulary, then constraints, until the parent closes its end; raises EOFError then."""
    setup = json.loads(frames.receive().payload)
    compiler = Compiler(tuple(bytes.fromhex(token) for token in setup["tokens"]), setup["eos_ids"])
    limits = GrammarLimits()
    frames.send({"refusal": ""})
    while True:
        request = frames.receive()
        kind, text = request.header["kind"], request.payload.decode("utf-8", "surrogatepass")
        refusal = ""
        try:
            check_text(kind, text, limits)
            compiler.compile(kind, text)
        except GrammarError as error:
            refusal = error.message
        except (MemoryError, RecursionError):
            refusal = _TOO_COMPLEX
        frames.send({"refusal": refusal})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    options = parser.parse_args()
    limit_memory(total_bytes=_MEMORY_BYTES)
    threading.stack_size(_STACK_BYTES)
    with frames_of_parent(options.fd) as frames:
        thread = threading.Thread(target=_serve_to_the_end, args=[frames])
        thread.start()
        thread.join()


def _serve_to_the_end(frames: FrameSocket) -> None:
    try:
        serve(frames)
    except (EOFError, ConnectionError):
        return  # the parent is gone


if __name__ == "__main__":
    main()
