"""The workers that make samples: processes, the process that forks them, threads in C."""
