"""The Celery workers: preprocess (never loads torch), encode, generate.

Front doors: `preprocess_worker`, `encode_worker` and `generate_worker`, each with a function `run`.
"""
