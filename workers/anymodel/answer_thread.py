"""One `generate` of transformers, resumed a token at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch


class CalledOffError(Exception):
    """Raised inside `generate` once nobody waits for its answer."""


class AnswerThread:
    """`generate` runs in a thread of its own, and only while `resume` waits for it: it stops at each row of
    logits until it is told the token. So transformers keeps what it knows of a model's caches and masks, many
    answers are under way together, and never do two forwards run at once.
    """

    def __init__(self, generate: Callable[[AnswerThread], None]) -> None:
        """`generate` calls `choose` with each row of logits, and ends where that raises `CalledOffError`."""
        self._generate = generate
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._row: np.ndarray | None = None
        self._token = 0
        self._error: Exception | None = None
        self.is_called_off = False

    def begin(self) -> np.ndarray | None:
        """The first row of logits, float32 [vocab]; None where `generate` ended. Raises what it raised."""
        self._thread.start()
        return self._wait()

    def resume(self, token: int) -> np.ndarray | None:
        """The row after `token`, as `begin`."""
        self._token = token
        self._go.release()
        return self._wait()

    def end(self) -> None:
        """Calls the rest off, and returns once the thread has let go of its caches."""
        if self._thread.is_alive():
            self.is_called_off = True
            self._go.release()
            self._thread.join()

    def choose(self, row: torch.Tensor) -> int:
        """In the thread: the token that follows, once the owner has drawn it."""
        self._row = row.detach().to("cpu", torch.float32).numpy()
        self._stopped.release()
        self._go.acquire()
        if self.is_called_off:
            raise CalledOffError
        return self._token

    def _run(self) -> None:
        try:
            self._generate(self)
        except CalledOffError:
            pass
        except Exception as error:
            self._error = error
        finally:
            self._stopped.release()

    def _wait(self) -> np.ndarray | None:
        self._stopped.acquire()
        if self._error is not None:
            raise self._error
        row, self._row = self._row, None
        return row
