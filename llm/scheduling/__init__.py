"""Which sequences run in the next step, and on which KV blocks. No tensors.

Front door: `llm.scheduling.scheduler`; who waits and who runs is in `admission` and `queues`.
"""
