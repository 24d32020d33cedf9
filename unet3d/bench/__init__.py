"""The measuring harness: loaders compared on the same work, and what is printed beside it."""
