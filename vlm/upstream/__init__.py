"""Another server's model behind this one: it renders and encodes by itself, and is asked over OpenAI's API.

Front door: `openai_engine.OpenAIEngine`, the `EngineClient` of `--engine openai --engine-url URL`.
"""
