"""Measurements of this machine: rates, overheads, probes on small random networks.

Front door: `vlm.plan.machine.calibration`.
"""
