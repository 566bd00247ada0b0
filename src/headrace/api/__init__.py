"""The HTTP front: OpenAI's API over a generator, with metrics, limits and a graceful end.

May import `core` and `front`.
"""
