"""Mathematical answers: what is one, and whether two are equal."""
