"""`vlm families --json` has the form that other programs read."""

from __future__ import annotations

import json

import pytest
from jsonschema import validate

from vlm.cli.models import families
from vlm.families.registry import BY_MODEL_TYPE

TEXT = {"type": "string", "minLength": 1}
SCHEMA = {
    "type": "object",
    "required": ["families"],
    "additionalProperties": False,
    "properties": {
        "families": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["model_types", "title", "engine", "licence", "sizes"],
                "additionalProperties": False,
                "properties": {
                    "model_types": {"type": "array", "minItems": 1, "items": TEXT},
                    "title": TEXT,
                    "engine": {"enum": ["native", "vllm", "openai", "transformers"]},
                    "licence": TEXT,
                    "sizes": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["repo", "params", "licence"],
                            "additionalProperties": False,
                            "properties": {"repo": TEXT, "params": TEXT, "licence": TEXT},
                        },
                    },
                },
            },
        }
    },
}


def test_families_are_listed_in_a_fixed_form(capsys: pytest.CaptureFixture[str]) -> None:
    families(as_json=True)
    listed = json.loads(capsys.readouterr().out)
    validate(listed, SCHEMA)
    native = [row for row in listed["families"] if row["engine"] == "native"]
    assert sorted(name for row in native for name in row["model_types"]) == sorted(BY_MODEL_TYPE)
