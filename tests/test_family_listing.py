"""`vlm families --json` has the form that other programs read."""

from __future__ import annotations

import json

import pytest
from jsonschema import validate

from llm.decoder_config import ConfigError
from vlm.cli.models import families
from vlm.families.elsewhere import ELSEWHERE, Elsewhere
from vlm.families.registry import BY_MODEL_TYPE, family_of
from vlm.foreign.engine_choice import transformers_types

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


@pytest.mark.parametrize("model", ELSEWHERE, ids=lambda model: model.title)
def test_a_model_left_out_names_the_engine_that_runs_it(model: Elsewhere) -> None:
    engine = "--engine transformers" if model.engine == "transformers" else "vLLM"
    for name in model.model_types:
        with pytest.raises(ConfigError, match=f"model_type {name} is not supported.*{engine}"):
            family_of({"model_type": name})


def test_transformers_has_a_class_for_what_it_is_named_for_and_for_nothing_else() -> None:
    for model in ELSEWHERE:
        has_class = {name in transformers_types() for name in model.model_types}
        assert has_class == {model.engine == "transformers"}, model.title


def test_no_model_is_listed_twice(capsys: pytest.CaptureFixture[str]) -> None:
    families(as_json=True)
    rows = json.loads(capsys.readouterr().out)["families"]
    names = [name for row in rows for name in row["model_types"]]
    assert len(names) == len(set(names))
