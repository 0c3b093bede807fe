"""Doors for users of other libraries; each room reads what its library reads, and nothing here imports it."""
