"""Who makes the samples: processes, the process that forks them, threads in C."""
