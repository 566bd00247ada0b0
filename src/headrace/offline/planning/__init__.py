"""In which order the requests of a job run: prefix tree, compute density, dual scan, length estimates. Policies only.

May import `core` and `perf`. `admission` is the door: `make_admission` gives the policy of an order.
"""
