"""The configuration of every recipe: its schema, and how it is loaded and validated. Nothing here imports torch."""
