"""Families that cut an image into tiles of one size: each tile gives as many visual tokens."""
