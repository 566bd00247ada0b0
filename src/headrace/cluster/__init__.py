"""Engines as processes: the worker's main, its messages, the local launcher and the client.

May import `core` and `engine`.
"""
