"""Embeddings of texts and images, where the server has an embedder.

Front door: `embedding_routes.router`.
"""
