"""What clients leave with the service: uploaded files and images, and images fetched by URL.

Front doors: `vlm.api.storage.file_routes` and `vlm.api.storage.image_routes`.
"""
