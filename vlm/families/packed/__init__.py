"""Families that keep an image's ratio on a canvas of tiles, and pack the visual tokens of the image alone."""
