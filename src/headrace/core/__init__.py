"""Plain data everyone shares: requests, sampling parameters, step plans, events, configuration, errors.

Imports nothing of Headrace and no torch.
"""
