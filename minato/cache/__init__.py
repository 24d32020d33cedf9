"""A cache of samples that workers, ranks and jobs share."""
