"""``minato analyze``: what limits a training program, and what would change that.

A program runs as ever while ``watch`` notes what its loader is asked for and delivers. At the
first iteration a copy of the process is forked (``keeper``), which holds the dataset. When the
program has ended, ``study`` measures samples, files and loaders in forks of that copy; ``stages``
says where a sample's time goes. ``conclude`` derives one limit and what would help from these
numbers alone, ``report`` and ``page`` write the answer, and ``command`` is what a user types.
"""
