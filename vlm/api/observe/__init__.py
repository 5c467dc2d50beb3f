"""What the service says of itself: health, metrics, logs, traces, measured stage rates.

Front door: `vlm.api.observe.health`.
"""
