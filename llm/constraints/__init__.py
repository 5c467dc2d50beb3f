"""Constrained decoding: grammars, regular expressions, choices and JSON schemas as token masks.

Front door: `llm.constraints.constrain`.
"""
