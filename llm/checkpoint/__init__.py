"""A decoder out of a Hugging Face directory, read strictly.

Front door: `llm.checkpoint.decoder_weights`.
"""
