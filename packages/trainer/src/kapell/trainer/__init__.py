"""Kapell trainer."""
