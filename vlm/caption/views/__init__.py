"""What is made of a journal for readers: CSV and Markdown.

Front door: `vlm.caption.views.formats`.
"""
