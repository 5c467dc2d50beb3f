"""`vlm bench peers`: the questions that other servers were timed with, on a SmolVLM-256M-shaped checkpoint.

A 1024x768 image (13 tiles), random weights, one thread; CPU seconds of this process: machines are shared.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from llm.request import SamplingParams
from vlm.arithmetic import settled
from vlm.bench.harness.engine_load import Driver, image_request, tiled_photo
from vlm.bench.harness.results import report, result, say
from vlm.build import build_runner
from vlm.config import EngineOptions
from vlm.plan.machine.synthetic import SMOLVLM_256M, write_checkpoint
from vlm.spec import ModelSpec

STREAMS = 8


class Interview:
    """Questions about one image, each timed in CPU seconds."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._image = tiled_photo()
        self._asked = 0

    def ask_anew(self, question: str) -> float:
        """`ask` for one token about an image that is new."""
        self._image = tiled_photo(self._asked + 1)
        return self.ask([question], 1)

    def ask(self, questions: list[str], tokens: int) -> float:
        """CPU seconds until all these questions, asked at once, have answers of `tokens` tokens."""
        started = time.process_time()
        for question in questions:
            self._asked += 1
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            asked = image_request(self._driver.spec, f"p{self._asked}", [self._image], question, params)
            self._driver.submit(asked.request, asked.images)
        self._driver.run()
        return time.process_time() - started


def run(quick: bool = False) -> dict[str, Any]:
    length = 20 if quick else 60
    with tempfile.TemporaryDirectory() as folder:
        directory = write_checkpoint(Path(folder) / "smolvlm-256m", SMOLVLM_256M)
        options = settled(EngineOptions(model=str(directory), kv_cache_mb=1500))
        spec = ModelSpec.load(directory, arithmetic=options.arithmetic)
        say("peers: a first question on an image of 13 tiles; about a minute")
        interview = Interview(Driver(spec, build_runner(options)))
        first = interview.ask(["What is the total?"], 1)
        say("peers: a second question, then one stream and eight")
        second = interview.ask(["Read the text of line two."], 1)
        alone = interview.ask(["Read the text of line two."], length)
        crowd = interview.ask([f"Read line {i}." for i in range(STREAMS)], length)
    about = {
        "model": "SmolVLM-256M shape",
        "dtype": options.dtype,
        "tower": options.arithmetic,
        "threads": 1,
        "context": 875,
    }
    return report(
        "peers",
        {
            "first_question_cpu_s": result(first, "CPU-s", batch=1, **about),
            "second_question_cpu_s": result(second, "CPU-s", batch=1, **about),
            "decode_cpu_ms_per_token": result(alone / length * 1e3, "CPU-ms", batch=1, **about),
            "tokens_per_cpu_s_8_streams": result(
                STREAMS * length / crowd, "tokens/CPU-s", batch=STREAMS, **about
            ),
        },
    )
