"""Any model that transformers has, as an engine of last resort: its own forward passes, its own processor."""
