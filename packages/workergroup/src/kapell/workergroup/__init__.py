"""Kapell workergroup."""
