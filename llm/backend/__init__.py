"""The one seam to a device: a step plan in, logits out.

Front door: `llm.backend.base`; its twins are `torch_backend` and `native`.
"""
