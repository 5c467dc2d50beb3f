"""OpenAI's older completions: texts that go on as they are, without a chat's template.

Front door: `text_routes.router`.
"""
