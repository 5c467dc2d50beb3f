"""A process that compiles each new constraint first: one that hangs, crashes or eats memory ends there."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

from llm.constraints.grammar import Compiler, GrammarDeadline, GrammarError, GrammarLimits, check_text

_MEMORY_BYTES = 2 << 30  # of address space
_STACK_BYTES = 2 << 20  # a quarter of what the engine's threads have: what fits here fits there
_START_S = 60.0
_TOO_COMPLEX = "The constraint is too complex."


class Sandbox:
    """Starts its process when first asked, and again after it was ended. One caller at a time."""

    def __init__(self, vocabulary: tuple[bytes, ...], eos_ids: frozenset[int], limits: GrammarLimits) -> None:
        self._setup = json.dumps(
            {"tokens": [token.hex() for token in vocabulary], "eos_ids": sorted(eos_ids)}
        )
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: Any = None
        self.num_started = 0

    def check(self, kind: str, text: str) -> None:
        """Raises GrammarError if the text does not compile within the deadline; OSError if the process
        can't be started."""
        process = self._process or self._start()
        try:
            answer = self._ask(process, json.dumps([kind, text]), self._limits.deadline_s)
        except (TimeoutError, EOFError, OSError) as error:
            self.close()
            refusal = GrammarDeadline if isinstance(error, TimeoutError) else GrammarError
            raise refusal(_TOO_COMPLEX) from None
        if answer:
            raise GrammarError(answer)

    def close(self) -> None:
        if self._stop is not None:
            self._stop()
        self._process = self._stop = None

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "llm.constraints.grammar_sandbox"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._process, self._stop = process, weakref.finalize(self, _end, process)
        self.num_started += 1
        try:
            self._ask(process, self._setup, _START_S)
        except (TimeoutError, EOFError) as error:
            self.close()
            raise OSError("the grammar sandbox does not start") from error
        return process

    def _ask(self, process: subprocess.Popen[bytes], line: str, timeout_s: float) -> str:
        assert process.stdin is not None and process.stdout is not None
        deadline = time.monotonic() + timeout_s
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
        received = b""
        while not received.endswith(b"\n"):
            readable, _, _ = select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0.0))
            if not readable:
                raise TimeoutError
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                raise EOFError
            received += piece
        answer: str = json.loads(received)
        return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not written has no reader any more
                pipe.close()


def _serve() -> None:
    """Lines of JSON: the vocabulary, then [kind, text]; answers are "" or why it was refused."""
    setup = json.loads(sys.stdin.readline())
    compiler = Compiler(tuple(bytes.fromhex(token) for token in setup["tokens"]), setup["eos_ids"])
    print(json.dumps(""), flush=True)
    limits = GrammarLimits()
    for line in sys.stdin:
        kind, text = json.loads(line)
        answer = ""
        try:
            check_text(kind, text, limits)
            compiler.compile(kind, text)
        except GrammarError as error:
            answer = error.message
        except (MemoryError, RecursionError):
            answer = _TOO_COMPLEX
        print(json.dumps(answer), flush=True)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
