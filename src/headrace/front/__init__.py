"""Between text and an engine: tokenise, detokenise, stop strings, chat templates, and the Python API.

May import `core`, `model` (only its hub), `engine` and `cluster` (to start an engine).
"""
