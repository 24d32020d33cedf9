"""The measuring harness: loaders compared on the same work, with the bounds printed for each."""
