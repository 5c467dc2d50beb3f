"""What the stages promise: interfaces, messages, event streams, codes of faults.

Front doors: `workers.contract.stages` and `workers.contract.engine_client`. Imports no other room.
"""
