"""Machine code of the store's own."""
