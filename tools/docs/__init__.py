"""The site: pages that are made when it is built, formulas, words for the search, and the numbers of the first pages.
`hooks.py` is what mkdocs calls."""
