"""Load over time: schedulers, queues, routing and fleets, simulated on the cost core.

Front doors: `vlm.plan.simulation.schedule` and `vlm.plan.simulation.fleet`.
"""
