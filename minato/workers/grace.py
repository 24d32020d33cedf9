"""How long a shutdown waits for whom, in seconds.

The zygote gives workers that are in the middle of a sample LEAVE and then TERM before it kills
them. The trainer gives the zygote STOP, which is more than both together, before it kills what is
left. So a shutdown takes about a second at most, unless the system does not end what was killed, or
a worker is done with its samples and does what ends a process: it writes what its queues, files and
exit functions hold, for which it has FINISH. Threads cannot be ended: after LEAVE the trainer goes
on without waiting.
"""

#: the zygote, for its workers to leave by themselves after the loader has said stop
LEAVE = 0.35
#: and then to obey SIGTERM
TERM = 0.15
#: and for what it had to kill to be gone
KILLED = 1.0
#: each of LEAVE, TERM and FINISH, once SIGTERM has come, by which multiprocessing ends the zygote
#: when the interpreter exits
TERMINATED = 0.05
#: the trainer, for the zygote to have done all that
STOP = 0.8
#: the zygote, for workers to finish what ends a process; torch waits as long for each
FINISH = 5.0
#: the trainer, for what it had to kill
KILL = 5.0
#: the interpreter, at its exit, for threads in the middle of a sample
EXIT = 2.0
#: the trainer, for the batch that is being pinned or copied to a device
STAGE = 5.0
#: the interpreter, at its exit, for copies to a device that nobody has waited for
COPIES = 5.0
