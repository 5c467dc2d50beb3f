"""The torch backend on a GPU: attention in one kernel, one copy a step, logits that stay, graphs of decodes.

Front door: `PagedBackend`.
"""
