"""Kapell ray_backend."""
