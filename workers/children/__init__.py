"""Child processes: how one is started, spoken with, limited and ended, and those that touch strangers' data.

Front doors: `workers.children.child` for a parent, `workers.children.frames` for the process itself.
"""
