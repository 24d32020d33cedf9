"""Properties of the scheduling policies, through their Python binding."""
