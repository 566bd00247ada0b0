"""Kernels: paged attention, token sampling (CPU by Numba, CUDA by FlashInfer or torch), and row kernels (CPU).

May import `core`.
"""
