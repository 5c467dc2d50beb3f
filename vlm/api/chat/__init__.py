"""Chat completions: from a client's JSON to the pipeline's messages, and from events to JSON.

Front door: `vlm.api.chat.chat_routes`; one request's life is in `generate`.
"""
