"""What is known of a model that another server runs: its configuration and tokenizer, no weights."""

from __future__ import annotations

import hashlib
from functools import cached_property

from vlm.spec import ModelSpec


class ConfiguredSpec(ModelSpec):
    """A family's own prompts, tiling and costs. Visual tokens are the other server's, so nothing is keyed by
    weights."""

    @cached_property
    def revision(self) -> str:
        return hashlib.sha256(f"upstream {self.name}".encode()).hexdigest()
