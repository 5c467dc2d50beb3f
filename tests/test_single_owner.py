"""One owner per product: bytes and FLOPs, visual tokens of tiles, tiles of a grid."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("preprocess", "encoder", "llm", "workers", "vlm")

KV_HEADS = {"num_kv_heads", "kv_heads", "num_key_value_heads", "n_kv"}
HEAD_DIM = {"head_dim", "d_head"}
BYTES_OR_LAYERS = {"num_layers", "num_hidden_layers", "element_bytes", "itemsize", "nbytes", "dtype_bytes"}
PARAMS = {"num_params", "active_params", "shared_params", "patch_params", "expert_params"}
PER_TILE = {"tokens_per_tile", "patches_per_tile", "_cells"}

# (what, owner's files): nobody else may form the product.
OWNERS = {
    "KV bytes": ("llm/cost/",),
    "FLOPs or bytes of parameters": ("llm/cost/", "encoder/geometry.py"),
    "visual tokens of tiles": (
        "encoder/",
        "vlm/families/",  # lay tokens out tile by tile; test_plan_exact.py holds their counts to geometry's
    ),
    "tiles of a grid": ("preprocess/", "vlm/train/"),  # vlm/train draws grids of its own to learn from
}


def _factors(node: ast.AST) -> list[str]:
    """Names in a chain of products and quotients, calls by their function's name."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div, ast.FloorDiv)):
        return _factors(node.left) + _factors(node.right)
    if isinstance(node, ast.Call):
        return _factors(node.func)
    if isinstance(node, ast.Attribute):
        return [node.attr]
    return [node.id] if isinstance(node, ast.Name) else []


def products(source: str) -> list[tuple[int, str]]:
    """(line, which product) of every telltale multiplication."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
            continue
        names = set(_factors(node))
        if names & KV_HEADS and names & HEAD_DIM and names & BYTES_OR_LAYERS:
            found.append((node.lineno, "KV bytes"))
        if names & PARAMS:
            found.append((node.lineno, "FLOPs or bytes of parameters"))
        if names & PER_TILE:
            found.append((node.lineno, "visual tokens of tiles"))
        if {"rows", "cols"} <= names:
            found.append((node.lineno, "tiles of a grid"))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_nobody_else_multiplies(package: str) -> None:
    offenders = []
    for path in sorted((ROOT / package).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for line, what in products(path.read_text(encoding="utf-8")):
            if not name.startswith(OWNERS[what]):
                offenders.append(f"{name}:{line}: {what}")
    assert offenders == []


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("2 * c.num_layers * c.num_kv_heads * c.head_dim * size", "KV bytes"),
        ("shape.num_kv_heads * shape.head_dim * x.itemsize", "KV bytes"),
        ("2 * model.num_params * n", "FLOPs or bytes of parameters"),
        ("grid.num_tiles * spec.geometry.tokens_per_tile", "visual tokens of tiles"),
        ("grid.rows * grid.cols + 1", "tiles of a grid"),
    ],
)
def test_the_check_sees_each_product(source: str, what: str) -> None:
    assert what in {found for _, found in products(source)}


def test_the_owners_do_form_them() -> None:
    """Else the names have changed and the check looks for nothing."""
    formed = set()
    for file in ("llm/cost/exact_bytes.py", "llm/cost/work.py", "encoder/geometry.py", "preprocess/types.py"):
        formed |= {what for _, what in products((ROOT / file).read_text())}
    assert formed == set(OWNERS)
