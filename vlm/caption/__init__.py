"""`vlm caption`: pages in, a journal of rows out, resumed where it was stopped.

Front doors: `vlm.caption.caption_job` (a job) and `vlm.caption.caption_runner` (its loop).
"""
