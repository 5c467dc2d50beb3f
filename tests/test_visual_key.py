"""Visual tokens are found by everything that they depend on, and by nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from vlm.config import DEFAULT_MODEL
from vlm.spec import ModelSpec

SPEC = ModelSpec.load(DEFAULT_MODEL)
WHOLE = {
    "digest": "a" * 64,
    "detail": "auto",
    "variant": "fast",
    "background": (255, 255, 255),
    "revision": SPEC.revision,
    "namespace": "",
}


def key(digest: str, detail: Any, variant: Any, background: Any, revision: str, namespace: str) -> str:
    spec = replace(SPEC)
    vars(spec)["revision"] = revision  # else read from the weights once, and kept
    how = replace(spec.preprocess_spec(detail), variant=variant, background=background)
    return spec.visual_key(digest, how, namespace)


def test_every_part_makes_a_key_of_its_own() -> None:
    others = {
        "digest": "b" * 64,
        "detail": "low",
        "variant": "exact",
        "background": (0, 0, 0),
        "revision": "0" * 64,
        "namespace": "someone",
    }
    keys = [key(**WHOLE), *(key(**(WHOLE | {name: value})) for name, value in others.items())]
    assert len(set(keys)) == len(others) + 1
    assert key(**WHOLE) == keys[0]


@settings(deadline=None, max_examples=50)
@given(
    st.text("ab", max_size=4), st.text("ab", max_size=4), st.text("ab", max_size=4), st.text("ab", max_size=4)
)
def test_no_two_of_revision_and_namespace_meet_in_one_key(a: str, b: str, c: str, d: str) -> None:
    """Fields are told apart however their texts run into one another."""
    one, other = (key(**(WHOLE | {"revision": r, "namespace": n})) for r, n in ((a, b), (c, d)))
    assert (one == other) == ((a, b) == (c, d))
