"""Kapell protocol."""
