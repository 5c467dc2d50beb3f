"""Text to token ids and back: tokenizer, chat template, stop strings, text that may be shown.

Front door: `llm.text.tokenizer`.
"""
