"""Models: find and convert files, load a Transformers decoder, prepare its linears, run a span of its layers.

May import `core`, `kernels`.
"""
