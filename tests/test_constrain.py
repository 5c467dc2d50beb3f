"""Constraints through the whole engine, on a model whose logits are noise: only the grammar makes sense."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
from fake_backend import ByteTokens, Harness, text_prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.constraints.constrain import Grammars
from llm.constraints.grammar import Compiler, GrammarError, GrammarLimits, check_text
from llm.request import Request, RequestError, SamplingParams
from workers.children.grammar_process import GrammarProcess

WORDS = (b"true", b"false", b"null", b'":', b'", "', b'"}', b"00", "\u00e9".encode(), "\u20ac".encode()[:2])
BYTES = 0xC0  # ASCII and what may follow in a longer UTF-8 sequence, so that none is a dead end
EOS_ID = BYTES + len(WORDS)
VOCABULARY = (*(bytes([i]) for i in range(BYTES)), *WORDS, b"")
VOCAB_SIZE = len(VOCABULARY) + 5  # logits have columns that the tokenizer lacks
# Noise seldom closes what it opens: closing tokens are made likelier.
BIAS = tuple((i, 3.0) for i in (*b'"}],.0', EOS_ID))
OBJECT = '{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"]}'


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(VOCABULARY, frozenset({EOS_ID}), VOCAB_SIZE, check=GrammarProcess)
    yield made
    made.close()


def harness_of(grammars: Grammars, **setup: Any) -> Harness:
    setup = {"num_blocks": 512, "max_positions": 1024, "max_running": 8} | setup
    return Harness(
        vocab_size=VOCAB_SIZE,
        grammars=grammars,
        tokens=ByteTokens((*VOCABULARY, *[b""] * 5)),
        eos=frozenset({EOS_ID}),
        **setup,
    )


def constrained(name: str, kind: str, text: str, seed: int = 0, **params: Any) -> Request:
    params = {"max_tokens": 600, "temperature": 1.0, "logit_bias": BIAS, "seed": seed} | params
    return Request(name, text_prompt(1, 2, 3 + seed % 90), SamplingParams(constraint=(kind, text), **params))


def answers(grammars: Grammars, requests: list[Request], **setup: Any) -> Harness:
    harness = harness_of(grammars, **setup)
    for request in requests:
        harness.submit(request)
    harness.run(200_000)
    harness.assert_clean()
    return harness


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["integer", "number", "boolean", "string", "enum", "pattern", "const", "null"]
    kind = rng.choice(kinds + (["object", "object", "array", "anyOf"] if depth < 3 else []))
    low = rng.randint(-50, 50)
    match kind:
        case "integer":
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 2000)}
        case "number":
            return {"type": "number", "minimum": low, "maximum": low + rng.randint(1, 100)}
        case "string":
            return {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 12)}
        case "enum":
            return {
                "enum": [*(f"v{rng.randint(0, 99)}" for _ in range(rng.randint(1, 5))), rng.randint(0, 9)]
            }
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-c]{2,5}$", r"^\d{4}-\d{2}$", "^(x|yz)+!$"])}
        case "const":
            return {"const": rng.choice([True, None, 3, "a b", "\u00e9"])}
        case "array":
            least = rng.randint(0, 2)
            items = random_schema(rng, depth + 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 3)}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
        case "object":
            names = [f"{'abc'[i]}{rng.randint(0, 9)}" for i in range(rng.randint(0, 3))]
            properties = {name: random_schema(rng, depth + 1) for name in names}
            required = [name for name in names if rng.random() < 0.6]
            return {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            }
    return {"type": kind}


def random_regex(rng: random.Random, depth: int = 0) -> str:
    leaf = rng.choice(["a", "b", "7", r"\.", "[a-f]", "[^a-z]", r"\d", r"\w", "-", "\u00e9"])
    if depth >= 3 or rng.random() < 0.3:
        return leaf
    inner = [random_regex(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    match rng.randint(0, 3):
        case 0:
            return "".join(inner)
        case 1:
            return f"({'|'.join(inner)})"
        case 2:
            return f"({inner[0]}){{{rng.randint(0, 2)},{rng.randint(2, 4)}}}"
    return f"({inner[0]}){rng.choice('?+')}"


def check_schemas(grammars: Grammars, count: int, seed: int) -> None:
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(count)]
    requests = [constrained(f"s{i}", "json_schema", json.dumps(s), i) for i, s in enumerate(schemas)]
    harness = answers(grammars, requests, checks=False)
    assert not harness.failed
    finished = [i for i in range(count) if harness.answer(f"s{i}").reason == "stop"]
    for i in finished:
        jsonschema.validate(json.loads(harness.answer(f"s{i}").text), schemas[i])
    assert len(finished) >= 0.9 * count


def check_regexes(grammars: Grammars, count: int, seed: int) -> None:
    rng = random.Random(seed)
    patterns = [random_regex(rng) for _ in range(count)]
    requests = [constrained(f"r{i}", "regex", pattern, i) for i, pattern in enumerate(patterns)]
    harness = answers(grammars, requests, checks=False)
    assert not harness.failed
    finished = [i for i in range(count) if harness.answer(f"r{i}").reason == "stop"]
    for i in finished:
        text = harness.answer(f"r{i}").text
        assert re.fullmatch(patterns[i], text), (patterns[i], text)
    assert len(finished) >= 0.9 * count


def test_finished_outputs_validate_against_random_schemas(grammars: Grammars) -> None:
    check_schemas(grammars, 40, 1)


def test_finished_outputs_match_random_regexes(grammars: Grammars) -> None:
    check_regexes(grammars, 20, 2)


@pytest.mark.slow
def test_finished_outputs_validate_against_300_random_schemas(grammars: Grammars) -> None:
    check_schemas(grammars, 300, 3)


@pytest.mark.slow
def test_finished_outputs_match_100_random_regexes(grammars: Grammars) -> None:
    check_regexes(grammars, 100, 4)


def test_a_grammar_and_any_json_object(grammars: Grammars) -> None:
    lark = 'start: "<" word ("," word)* ">"\nword: /[a-z]{1,3}/'
    requests = [constrained("g", "grammar", lark), constrained("o", "json_object", "", max_tokens=1000)]
    harness = answers(grammars, requests)
    assert re.fullmatch(r"<[a-z]{1,3}(,[a-z]{1,3})*>", harness.answer("g").text)
    if harness.answer("o").reason == "stop":
        assert isinstance(json.loads(harness.answer("o").text), dict)
    assert harness.answer("o").text.startswith("{")


def test_the_end_of_the_grammar_ends_the_answer_and_max_tokens_cuts_it(grammars: Grammars) -> None:
    requests = [
        constrained("whole", "regex", "[ab]{5}", ignore_eos=True),
        constrained("cut", "regex", "[ab]{5}", max_tokens=4),
        constrained("exact", "regex", "[ab]{5}", max_tokens=5),
        constrained("greedy", "regex", "[ab]{5}", temperature=0.0),
    ]
    harness = answers(grammars, requests)
    assert [harness.answer(name).reason for name in ("whole", "cut", "exact")] == ["stop", "length", "stop"]
    assert [len(harness.answer(name).token_ids) for name in ("whole", "cut", "exact")] == [5, 4, 5]
    assert re.fullmatch("[ab]{5}", harness.answer("greedy").text)


def test_ignoring_end_tokens_goes_on_as_long_as_the_grammar_can(grammars: Grammars) -> None:
    harness = answers(grammars, [constrained("r", "regex", "[ab]*", ignore_eos=True, max_tokens=50)])
    assert harness.answer("r").reason == "length"
    assert re.fullmatch("[ab]{50}", harness.answer("r").text)


def test_an_end_token_comes_only_where_the_grammar_may_stop(grammars: Grammars) -> None:
    urge = ((EOS_ID, 100.0),)
    harness = answers(grammars, [constrained("r", "regex", "[ab]{3,9}", logit_bias=urge)])
    assert len(harness.answer("r").token_ids) == 4 and harness.answer("r").token_ids[-1] == EOS_ID


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 99)), min_size=2, max_size=5),
    st.sampled_from(["recompute", "swap"]),
)
def test_choices_and_preemption_do_not_disturb_the_matchers(
    grammars: Grammars, wanted: list[tuple[int, int]], preemption: str
) -> None:
    schema = json.dumps({"type": "array", "items": {"enum": ["ab", 7, True]}, "minItems": 2, "maxItems": 6})
    requests = [
        constrained(f"r{i}", "json_schema", schema, s, n=n, max_tokens=60) for i, (n, s) in enumerate(wanted)
    ]
    requests = [*requests, *(constrained(f"x{i}", "regex", "[a-d]{40}", i, max_tokens=60) for i in range(2))]
    roomy = answers(grammars, requests, max_positions=700)
    size = {"num_blocks": 52, "block_size": 4, "max_positions": 700}
    crowded = harness_of(grammars, preemption=preemption, prefix_cache=False, **size)
    for request in requests:
        crowded.submit(replace(request, priority="batch" if request.id[0] == "r" else "interactive"))
    crowded.run()
    crowded.assert_clean()
    assert crowded.answers == roomy.answers and not roomy.failed
    for request in requests[: len(wanted)]:
        for choice in range(request.params.n):
            answer = roomy.answer(request.id, choice)
            assert answer.reason == "stop"
            jsonschema.validate(json.loads(answer.text), json.loads(schema))


def test_a_preempted_stream_goes_on_where_its_grammar_was(grammars: Grammars) -> None:
    requests = [constrained(f"x{i}", "regex", "[a-d]{120}", i, max_tokens=130) for i in range(3)]
    harness = answers(grammars, requests, num_blocks=50, max_positions=200)
    stats = harness.engine.stats()
    assert stats.preempted_recompute + stats.preempted_swap > 0
    assert all(re.fullmatch("[a-d]{120}", harness.answer(r.id).text) for r in requests)


def chain(kind: str, length: int) -> str:
    if kind == "grammar":
        rules = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(length))
        return f'start: r0\n{rules}\nr{length}: "a"'
    links = {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(length)}
    return json.dumps({"$ref": "#/$defs/a0", "$defs": links | {f"a{length}": {}}}, separators=(",", ":"))


HOSTILE = {
    "deep": ("json_schema", '{"items":' * 500 + "{}" + "}" * 500),
    "huge": ("json_schema", json.dumps({"enum": ["x" * 100_000]})),
    "chain": ("json_schema", chain("json_schema", 1000)),
    "rules": ("grammar", chain("grammar", 3000)),
    "doubling": ("grammar", chain("grammar", 60).replace("r", "T").replace("staTt", "start")),
    "stars": ("regex", "a" + "*?" * 20_000),
    "nested": ("regex", "(" * 300 + "a" + ")*" * 300),
    "subset": ("regex", "(a|b)*a(a|b){30}c"),
    "remote": ("json_schema", '{"$ref":"http://example.com/a.json"}'),
    "list": ("json_schema", "[1]"),
    "broken": ("json_schema", '{"type":'),
    "regex": ("regex", "(a"),
    "keyword": ("json_schema", '{"type":"object","dependentSchemas":{"a":{}}}'),
    "kind": ("xml", "<a/>"),
}


def test_hostile_constraints_fail_alone_while_another_stream_gets_a_token_every_step() -> None:
    grammars = Grammars(VOCABULARY, frozenset({EOS_ID}), VOCAB_SIZE, check=GrammarProcess)
    harness = harness_of(grammars, checks=False, max_running=16)
    refused = set()
    for name, (kind, text) in HOSTILE.items():
        try:
            harness.submit(constrained(name, kind, text, max_tokens=40))
        except RequestError as error:
            assert error.code == "invalid_constraint" and len(error.message) < 300
            refused.add(name)
    streams = steps = 0
    while not HOSTILE.keys() <= refused | harness.failed.keys() | harness.finished.keys():
        if f"stream{streams}" in harness.finished or not streams:
            streams += 1
            params = SamplingParams(max_tokens=900, ignore_eos=True)
            harness.submit(Request(f"stream{streams}", text_prompt(5), params))
        harness.step()
        steps += 1
        told = [answer for (name, _), answer in harness.answers.items() if name.startswith("stream")]
        assert sum(len(answer.token_ids) for answer in told) == steps
    assert all(failed.code == "invalid_constraint" for failed in harness.failed.values())
    assert refused == {"deep", "huge", "list", "broken", "kind", "nested"}
    assert harness.failed.keys() == HOSTILE.keys() - refused - {"subset"}  # grows while it generates
    for name in [name for name, _ in harness.answers if "stream" in name]:
        harness.engine.cancel(name)
    harness.submit(constrained("good", "json_schema", OBJECT))
    harness.run()
    assert isinstance(json.loads(harness.answer("good").text)["a"], bool)
    grammars.close()


def test_a_compile_that_hangs_is_ended_at_its_deadline_and_the_next_one_works() -> None:
    checks: list[GrammarProcess] = []

    def check_of(*about: Any) -> GrammarProcess:
        checks.append(GrammarProcess(*about))
        return checks[-1]

    limits = GrammarLimits(deadline_s=2.0)
    grammars = Grammars(VOCABULARY, frozenset({EOS_ID}), VOCAB_SIZE, limits, check=check_of)
    grammars.compile("regex", "a").result()
    (check,) = checks
    child = check.child
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    with pytest.raises(GrammarError, match="too complex"):
        grammars.compile("regex", "b").result()
    assert child.exit_status == -signal.SIGKILL
    grammars.compile("regex", "c").result()
    assert check.num_started == 2
    grammars.close()


def test_compiled_grammars_are_kept_most_recent_first_and_refusals_too() -> None:
    grammars = Grammars(
        VOCABULARY, frozenset({EOS_ID}), VOCAB_SIZE, GrammarLimits(max_cached=2), check=GrammarProcess
    )
    first = grammars.compile("regex", "a")
    assert grammars.compile("regex", "a") is first  # also while it is being compiled
    with pytest.raises(GrammarError):
        grammars.compile("regex", "(a").result()
    with pytest.raises(GrammarError):
        grammars.compile("regex", "(a").result()
    assert (grammars.counters.hits, grammars.counters.misses) == (2, 2)
    grammars.compile("regex", "a")
    grammars.compile("grammar", "start: /a/")  # pushes the refusal out
    assert grammars.compile("regex", "a") is first
    assert (grammars.counters.hits, grammars.counters.misses, grammars.counters.evictions) == (4, 3, 1)
    grammars.compile("regex", "(a")
    assert (grammars.counters.misses, grammars.counters.evictions) == (4, 2)
    grammars.close()


def test_a_request_cancelled_while_its_grammar_compiles_leaves_nothing(grammars: Grammars) -> None:
    harness = harness_of(grammars)
    harness.submit(constrained("r", "regex", "never seen before"))
    assert harness.engine.has_work
    harness.engine.cancel("r")
    assert not harness.engine.has_work
    harness.submit(constrained("s", "regex", "ab"))
    harness.run()
    harness.assert_clean()
    assert harness.answer("s").text == "ab" and ("r", 0) not in harness.answers


def test_beams_and_engines_without_grammars_refuse_constraints(grammars: Grammars) -> None:
    with pytest.raises(RequestError, match="Beam search"):
        harness_of(grammars).submit(constrained("r", "regex", "a", beam_width=2, temperature=0.0))
    with pytest.raises(RequestError, match="not available"):
        Harness().submit(Request("r", text_prompt(1), SamplingParams(8, constraint=("regex", "a"))))


@pytest.mark.parametrize("kind", ["regex", "grammar", "json_schema"])
def test_depth_is_counted_outside_strings_and_escapes(kind: str) -> None:
    flat = {"json_schema": '{"const":"((([[[{{{\\"((("}', "regex": r"\(\(\(\(", "grammar": r"start: /\(\(\(/"}
    check_text(kind, flat[kind], GrammarLimits(max_depth=1))
    deep = {"json_schema": '{"items":{}}', "regex": "((a))", "grammar": 'start: (("a"))'}
    with pytest.raises(GrammarError, match="nested"):
        check_text(kind, deep[kind], GrammarLimits(max_depth=1))


def test_the_vocabulary_spells_text_by_longest_match() -> None:
    tokenizer = Compiler(VOCABULARY, {EOS_ID}).tokenizer
    ids = tokenizer.tokenize_str("true00")
    assert b"".join(VOCABULARY[i] for i in ids) == b"true00"


def test_masks_cover_every_column_of_the_logits(grammars: Grammars) -> None:
    matcher = grammars.start(grammars.compile("regex", "[^x]|xy"))
    mask = matcher.mask()
    assert mask.shape == (VOCAB_SIZE,) and not mask[EOS_ID:].any()
    copy = matcher.fork()
    copy.accept(ord("x"))
    assert np.flatnonzero(copy.mask()).tolist() == [ord("y")]
    assert (matcher.mask() == mask).all()
