"""Image bytes to tiles: header probe, limits, one decode function, tiling rules, the tiles' wire format.

Front door: `preprocess.stage`. numpy and PIL only; nothing of the project is imported here.
"""
