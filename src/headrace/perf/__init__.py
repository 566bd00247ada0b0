"""Device profiles (measured or preset), operator and step times, rooflines. No torch.

May import `core`.
"""
