"""How a tower's forwards run, whatever network it is: in which arithmetic, and captured on a GPU.

Front doors: `mixed.multiply_in_bfloat16`, `tile_graphs.TileGraphs`.
"""
