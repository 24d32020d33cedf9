"""``minato analyze``: what limits a training program, and what would change that.

A program runs as ever while ``watch`` notes what its loader is asked for and delivers; ``listener``
gets these notes in the command's process. At the first iteration a copy of the process is forked
(``keeper``), which holds the dataset. When the program has ended, ``measure`` asks that copy for one
measurement after another, each made by ``study`` in a fork of it:

``work``        the time of a sample; ``stages`` sets the clocks that say where it goes
``contention``  samples by several processes and threads at once
``storage``     reads alone
``loaders``     the rate of a loader, also with a change
``codecs``, ``orders``   other encodings of images, other orders of transforms

``facts`` holds what was found. ``limits`` derives the one limit from it, ``changes`` and
``codec_rates`` what would help. ``report`` and ``page`` write the answer. ``command`` is what a user
types, ``stand_in`` the program for a factory or a folder, ``recode`` the command of that name.
"""
