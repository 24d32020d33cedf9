"""Observing loaders: statistics, a verdict, traces, a live table, checks of the machine."""
