"""What work costs before it runs, and what this machine can do.

Front door: `vlm.plan.cli`. Rooms: `labs` (formulas), `simulation` (load over time), `machine` (measurements).
"""
