"""What strangers' files say of themselves, read within bounds: one module for each format that needs one.

Front door: `preprocess.probe.open_header`, which hands on what is needed for the pixels and nothing else.
"""
