"""The HTTP service.

Front doors: `vlm.api.app` (all routes) and `vlm.api.server` (runs it). Rooms: `chat`, `batches`, `storage`
(files and images), `guard` (who may, and how much), `observe` (health, metrics, logs).
"""
