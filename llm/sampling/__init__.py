"""From a row of logits to a token: sampling, beam search, drafts for speculation.

Front door: `llm.sampling.sampler`.
"""
