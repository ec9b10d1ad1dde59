"""Kapell decorators."""
