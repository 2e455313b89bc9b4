"""Vertex AI custom jobs as a backend."""
