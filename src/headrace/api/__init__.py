"""The OpenAI HTTP surface.

May import `core` and `front`.
"""
