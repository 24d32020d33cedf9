"""Attacks on the loader: killed processes, signals, forks, memory that is held on to."""
