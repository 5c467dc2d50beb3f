"""Requests as clients write them, for the API and for batch files: schemas, content parts, settings, errors.

Front doors: `vlm.requests.schemas` and `vlm.requests.lines`. Neither the API nor captioning is imported here.
"""
