"""An API node in a process of its own, for test_cut_off.py: node_child.py URL REPLICAS STREAMS MAX_TOKENS.

Begins when a line comes in. Says "begun" once every stream has its first tokens, and at the end a JSON list:
(how it ended, text) of each.
"""

from __future__ import annotations

import asyncio
import json
import sys

from direct_cluster import picture, question

from llm.request import Delta, Failed, Finished, SamplingParams
from vlm.config import DEFAULT_MODEL
from vlm.pipeline import Pipeline
from vlm.spec import ModelSpec
from workers.cluster.node.remote_engine import RemoteEngine
from workers.local.preprocess_inline import InlinePreprocess


async def main(url: str, num_replicas: int, num_streams: int, max_tokens: int) -> None:
    spec = ModelSpec.load(DEFAULT_MODEL)
    engine = RemoteEngine(url, url, revision=spec.revision)
    pipeline = Pipeline(spec, InlinePreprocess(), engine)
    await pipeline.start()
    while len(engine.info["replicas"]) < num_replicas:
        await asyncio.sleep(0.1)
    await asyncio.to_thread(sys.stdin.readline)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=1.0, seed=7)
    begun: set[int] = set()

    async def stream(number: int) -> tuple[str, str]:
        text, end = "", ""
        async for event in pipeline.run(pipeline.prepare(f"r{number}", question(picture(number)), params)):
            if isinstance(event, Delta):
                text += event.text
                begun.add(number)
                if len(begun) == num_streams:
                    begun.add(-1)
                    print("begun", flush=True)
            elif isinstance(event, Failed | Finished):
                end = event.code if isinstance(event, Failed) else event.reason
        return end, text

    print(json.dumps(await asyncio.gather(*map(stream, range(num_streams)))), flush=True)
    await pipeline.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
