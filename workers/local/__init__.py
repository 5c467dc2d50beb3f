"""The stages on one machine: decode processes, the engine on a thread or in a process of its own.

Front doors: `workers.local.preprocess_pool` and `workers.local.engine_process`.
"""
