"""Environments of other projects, which a configuration names by their import path."""
