"""Measurements, side by side; each prints one JSON object.

May import every room.
"""
