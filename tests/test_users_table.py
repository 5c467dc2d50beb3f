"""Which test holds which of the faults that users of such servers reported.

A test claims a row by its name (`test_d10_...`) or by naming it in its docstring, or in its module's. Rows
whose tests don't say so are listed here by hand, and so is the one that no test can hold.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

ROWS = {
    "D1": "EXIF orientation is applied before tiling",
    "D2": "one decode function, whichever way an image comes in",
    "D3": "transparency is composited on a background",
    "D4": "every colour mode gives right RGB or a clear 400",
    "D5": "an animation is its first frame",
    "D6": "other formats get a 400 that names the accepted ones",
    "D7": "a truncated file is a 400",
    "D8": "error texts hold no reprs and no paths",
    "D9": "a decoder that hangs is replaced, its image ends as a 400",
    "D10": "placeholders equal encoder rows at every size",
    "D11": "bombs are refused from the header; the cap sums over a request",
    "P1": "a data: URI without base64 is a 400",
    "P2": "each broken data: URI has a message of its own",
    "P3": "bare base64 and empty urls are told the right shape; a plain string is taken",
    "P4": "an unsupported part is named by its place",
    "P5": "files and PDFs as parts are refused clearly",
    "P6": "too many images, history included, before any work",
    "P7": "an over-long prompt is refused with text and image tokens",
    "P8": "an image beyond the encoder's budget is refused at admission",
    "P9": "what can never fit the KV cache is refused",
    "P10": "a wrong number of embeddings fails that request only",
    "P11": "usage is whole, equal in both forms, equal to the metrics' delta",
    "P12": "detail is honoured, checked and part of the key",
    "F1": "no request reaches an inner address",
    "F2": "fetching has one deadline, neighbours go on",
    "F3": "an endless body ends at the cap",
    "F4": "nothing opens files by itself",
    "C1": "same text, other image: other answer",
    "C2": "full digest and offset in every block key of an image",
    "C3": "an id is bound to its content",
    "C4": "an unknown id is a distinct 4xx",
    "C5": "instruction-first prompts share their text over pages",
    "C6": "one image is encoded once, however many ask",
    "C7": "holds return to zero",
    "C8": "caches have a byte cap and can be cleared",
    "C9": "cold and warm answers are equal",
    "S1": "liveness answers while images decode",
    "S2": "processes of one thread each scale",
    "S3": "decoded bytes in flight are bounded",
    "S4": "a client that leaves frees everything at every stage",
    "S5": "a long prefill does not starve running streams",
    "S6": "two images over the budget end, one after the other",
    "S7": "batch work does not delay interactive requests",
    "S8": "readiness follows the engine's progress, liveness does not",
    "B1": "rows are durable one by one",
    "B2": "a restart resumes by custom_id; cancel ends",
    "B3": "a bad row is an error line",
}

BY_HAND = {
    "B1": ["test_a_row_is_on_disk_when_append_returns"],
    "S6": ["test_two_images_over_the_limit_end_and_a_small_one_passes_them"],
}

NO_TEST = {"S2": "a measurement: `vlm bench preprocess` prints images/s with one worker and with two"}

ADVISORIES = {
    "pickle over the network": ["test_nothing_is_unpickled_or_loaded_as_code"],
    "huge n, max_tokens, top_logprobs, stop lists, headers": [
        "test_caps_and_ranges_name_the_parameter",
        "test_header_caps",
    ],
    "grammar bombs": ["test_a_schema_has_a_size_cap"],
    "auth bypass and open side routes": [
        "test_every_route_asks_for_a_key_but_the_named_few",
        "test_spellings_of_a_path_open_nothing",
    ],
    "cache probing across tenants": [
        "test_equal_prompts_in_other_namespaces_share_nothing",
        "test_a_right_key_passes_and_its_namespace_travels",
        "test_an_image_has_visual_tokens_of_each_namespace_and_one_set_within_it",
    ],
    "native image code": [
        "test_d6_other_formats_are_refused_by_a_message_that_names_the_accepted_ones",
        "test_d9_image_that_needs_too_much_memory_ends_after_three_attempts",
    ],
}

_ID = re.compile(r"\b([DPFCSB]\d{1,2})\b")


@cache
def functions_by_name() -> dict[str, tuple[str, str]]:
    """Test function -> (file, docstring)."""
    found = {}
    for path in sorted(TESTS.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found[node.name] = (path.name, ast.get_docstring(node) or "")
    return found


@cache
def claims() -> dict[str, list[str]]:
    """Row -> tests that claim it."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, (file, text) in functions_by_name().items():
        if file == Path(__file__).name:
            continue
        rows = set(_ID.findall(text)) | {
            word.upper() for word in name.split("_") if _ID.fullmatch(word.upper())
        }
        for row in rows & ROWS.keys():
            found[row].append(f"{file}::{name}")
    for path in sorted(TESTS.glob("test_*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        for row in set(_ID.findall(text)) & ROWS.keys():
            found[row].append(path.name)
    for row, names in BY_HAND.items():
        found[row] += names
    return dict(found)


@pytest.mark.parametrize("row", ROWS)
def test_every_reported_fault_has_its_test_or_its_reason(row: str) -> None:
    assert bool(claims().get(row)) != (row in NO_TEST), ROWS[row]


def test_tests_named_by_hand_exist() -> None:
    names = [name for names in (*BY_HAND.values(), *ADVISORIES.values()) for name in names]
    assert [name for name in names if name not in functions_by_name()] == []


def test_the_table_can_be_read() -> None:
    """`pytest -s tests/test_users_table.py -k read` prints it."""
    for row, text in ROWS.items():
        print(f"{row:4} {text}\n     " + "\n     ".join(claims().get(row) or [NO_TEST[row]]))
    assert len(ROWS) == 47
