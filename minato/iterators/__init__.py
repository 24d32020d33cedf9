"""Iterators behind ``iter(loader)``: one per kind of scheduling."""
