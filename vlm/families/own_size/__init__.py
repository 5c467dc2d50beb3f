"""Families that keep an image's own size: its visual tokens grow with it."""
