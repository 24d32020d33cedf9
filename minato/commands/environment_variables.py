"""Every environment variable of minato's: which program reads it, and what it does.

``tests/observe/test_environment_variables.py`` finds the names in the sources. It fails for a name
that is missing here.
"""

from __future__ import annotations

#: read by a program that uses minato
PROGRAM: dict[str, str] = {
    "MINATO_ANALYZE": "Set by `minato analyze` for the program that it watches: where to write its "
    "observations.",
    "MINATO_DEVICE_OPERATORS": "0: with `device=`, too, all operators of minato.ops run on the "
    "host.",
    "MINATO_METRICS": "Where minato.metrics exports to: a file, with %r for the rank and %p for the "
    "process, or HOST:PORT.",
    "MINATO_SCHEDULING": '"balanced" or "static": the default of `scheduling`; read when minato is '
    "imported.",
    "MINATO_TRACE": "File to which all loaders write a timeline, for Perfetto or chrome://tracing.",
}

#: read by setup.py while minato is built
BUILD: dict[str, str] = {
    "MINATO_CUDA": "0: leave the kernels for CUDA devices out.",
    "MINATO_FAULTS": "1: compile in the fault points at which tests kill processes.",
    "MINATO_OPTIMIZE": "In place of -O3.",
    "MINATO_PURE": "1: Python alone, for systems where torch's own loader does the work.",
    "MINATO_SANITIZE": '"address,undefined" or "thread": build with these sanitizers.',
    "MINATO_TEST_BINDINGS": "1 or 0: with or without the functions that only tests and the "
    "simulator call. By default a build in a source tree has them, and a wheel has not.",
    "MINATO_TORCH": "0: leave the optional torch extension out.",
    "MINATO_WERROR": "1: compiler warnings are errors.",
}

#: read by tests and benchmarks
TESTS: dict[str, str] = {
    "MINATO_FAULT": '"LABEL N FILE HOW": die or stop at that fault point, in a build that has them '
    "(csrc/py/module/mn_module.c).",
    "MINATO_FAULT_SPARES": "The process that passes its point unharmed.",
    "MINATO_FUZZ_SECONDS": "New random examples at each run, for this many seconds a test.",
    "MINATO_KITS19": "Folder with real KiTS19 labels.",
    "MINATO_STRESS_SECONDS": "How long a stress test repeats itself.",
    "MINATO_TEST_AARCH64": "1: run the programs of tests/c for AArch64, in an emulator.",
    "MINATO_TEST_DEADLINE": "Seconds after which a program of tests/c gives up.",
    "MINATO_TEST_FAULTS": "How often each fault point is tried; without it none is.",
    "MINATO_TEST_LOADERS": "The kinds of loader that tests/contract runs with, split by commas.",
    "MINATO_TEST_MUTANTS": "1: break the sources in known ways, and expect failures.",
    "MINATO_TEST_SANITIZED": "1: run tests in a build with sanitizers.",
    "MINATO_TEST_SEED": "Seed of the random parts of tests.",
    "MINATO_TEST_TOKEN": "Set by tests, to find the processes they have started.",
}

ALL: dict[str, str] = {**PROGRAM, **BUILD, **TESTS}
