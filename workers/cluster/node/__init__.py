"""What an API node runs: the choice of a replica, calls that survive it, visual tokens on their way.

Front doors: `workers.cluster.node.remote_engine` and `workers.cluster.node.preprocess_celery`.
"""
