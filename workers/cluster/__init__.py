"""The stages over Celery and Redis: names, blobs, ledger, registry, event streams.

Rooms: `node` (what an API node runs) and `worker` (what `vlm worker` runs).
"""
