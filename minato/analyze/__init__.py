"""``minato analyze``: what limits a training program, and what would change that.

Four kinds of process take part:

- the program: ``inject/sitecustomize.py`` starts ``watch`` in it, which notes what its loader is asked for
  and delivers, and at the first iteration forks a copy of the process;
- the keeper, which is that copy (``keeper``): it holds the dataset, and does nothing until the program has
  ended;
- a fork of the keeper for each measurement, which writes to files of its own (``own_files``);
- the command (``command``), which gets what the others tell; ``measure`` asks for one measurement after
  another and checks changes, and the rest makes an answer of numbers.

What they tell each other, and ``report.json``, are the classes of ``records``. Measurements:

- ``work``: the time of a sample, reads alone, and samples by several processes and threads at once;
  ``stages`` sets the clocks that say where the time goes
- ``loaders``: the rate of a loader, also with a change
- ``codecs``, ``orders``: other encodings of images, other orders of transforms

``facts`` reads what was found. ``advice`` derives the one limit from it, and what would help. ``report``
writes the answer and the page. ``stand_in`` is the program for a factory or a folder,
and ``recode`` the command of that name.
"""
