"""The articles' four labs: KV cache, serving, batching, image budget.

Each module computes one plan; the products of bytes and FLOPs are `llm.cost`'s.
"""
