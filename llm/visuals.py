"""Where the engine gets visual tokens from. The implementation lives with the encoder's batcher."""

from __future__ import annotations

from typing import Any, Protocol

from llm.request import VisualKey


class VisualSource(Protocol):
    """Visual tokens by key; an entry held by anyone is never evicted."""

    def get(self, key: VisualKey) -> Any | None:
        """[num_tokens, d_model] in the backend's array type, or None while they are not there."""
        ...

    def hold(self, key: VisualKey) -> None:
        """A live request may read this key: keep it once it arrives. Counted."""
        ...

    def release(self, key: VisualKey) -> None: ...

    def drop(self, key: VisualKey) -> None:
        """Forgets an entry that has another number of rows than its image's plan, even if it is held."""
        ...

    def failed(self, key: VisualKey) -> tuple[str, str] | None:
        """(code, message) if producing this key failed for good, else None."""
        ...
