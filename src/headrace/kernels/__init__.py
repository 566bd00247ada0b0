"""Kernels: paged attention and token sampling, one interface for CPU (Numba) and CUDA (FlashInfer or torch).

May import `core`.
"""
