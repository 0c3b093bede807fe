"""The configuration of every recipe: schema, loading, judgement. Imports no torch."""
