"""/v1/batches: rows on disk, run beside interactive requests, resumed after a restart.

Front door: `vlm.api.batches.batch_routes`.
"""
