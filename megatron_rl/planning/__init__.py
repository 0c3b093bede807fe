"""The numbers of a run before anything starts: sizes, memory, times, layouts. README.md describes them."""
