"""How long each process waits for others during a shutdown, in seconds.

The zygote waits LEAVE and then TERM for workers in the middle of a sample, then kills them. The
trainer waits STOP for the zygote, which is longer than both together, then kills what is left. So a
shutdown takes about a second at most, with two exceptions. The system may be slow to end a killed
process. And a worker that has made its last sample may take FINISH to end its process. In this
time it runs exit functions and flushes queues and files. Threads cannot be killed: after LEAVE the
trainer goes on without waiting.
"""

#: the zygote waits for workers to exit by themselves after the loader's request
LEAVE = 0.35
#: then the zygote waits for workers to obey SIGTERM
TERM = 0.15
#: then the zygote waits for the end of the workers that it has killed
KILLED = 1.0
#: limit on each of LEAVE, TERM and FINISH once the zygote has got SIGTERM: multiprocessing sends
#: it when the interpreter exits
TERMINATED = 0.05
#: the trainer waits for the zygote to do all of this
STOP = 0.8
#: the zygote waits for workers at the end of their process; torch waits as long for each
FINISH = 5.0
#: the trainer waits for the end of the processes that it has killed
KILL = 5.0
#: the interpreter, at its exit, waits for threads in the middle of a sample
EXIT = 2.0
#: the trainer waits for the batch that is being pinned or copied to a device
STAGE = 5.0
#: the interpreter, at its exit, waits for copies to a device that no code has waited for
COPIES = 5.0
