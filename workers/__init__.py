"""The stages of the pipeline in processes and on machines.

Rooms: `contract` (interfaces and messages), `local` (one machine), `cluster` (Celery and Redis).
"""
