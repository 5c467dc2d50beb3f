"""Prompts with visual tokens to text: requests, blocks, prefix keys, scheduler, sampler, decoder.

Front door: `llm.engine`; `llm.request` holds what is asked of it. Torch only in `llm.backend` and
`llm.checkpoint`.
"""
