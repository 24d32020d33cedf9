"""Why CI may skip a test: patterns of reasons, each with its ground.

A reason that is not listed fails the run, so that no test is dropped silently.
Outside CI anything may be missing.
"""

from __future__ import annotations

import re

LIBRARIES = (
    "accelerate|av|composer|datasets|fastai|h5py|ignite|IPython|lightning|litdata|lmdb|monai|prometheus_client|ray|"
    "rich|skorch|soundfile|streaming|timm|torch_geometric|torchdata|torchvision|transformers|ultralytics"
)

LISTED: dict[str, str] = {
    # missing on the machines of CI
    "clang is not installed|there is no clang":
        "gcc builds all of it there; a developer's clang, or one installed for make nightly, "
        "builds it a second time.",
    "there is no libjpeg-turbo":
        "The tests' own Pillow brings one in its wheels; where it does not, Pillow decodes.",
    "atheris is not installed":
        "The same targets run on random bytes; where it is, make fuzz-inputs sees what it covers.",
    "(aarch64-linux-gnu-gcc|aarch64|qemu-aarch64) is not installed":
        "The kernels for AArch64 are tested where a compiler and an emulator for it are.",
    "takes minutes: make sanitize-programs runs it|valgrind is not installed":
        "The sanitizers of the compiler run on the same programs.",
    "takes minutes: set MINATO_TEST_AARCH64":
        "make aarch64, a part of make nightly, runs them.",
    "there is no CUDA device":
        "The emulated driver of the other tests of that folder runs the same code.",
    "this torch asks CUDA whether to pin":
        "So does torch 2.6, which make torches tries; torch's own part of pinning is another there.",
    "no accelerator":
        "The same code is tested with a fake one in contract/test_pinning_ahead.py.",
    rf"could not import '({LIBRARIES}|webdataset)[\w.]*': No module named .*":
        "They are large; make libraries installs them and runs these tests.",
    r"NVIDIA DALI is not installed.*|.*nvidia-dali.*":
        "It needs an accelerator to be of use; what surrounds it is tested without it.",
    r"no real (KiTS19 labels|label files) in .*":
        "The data may not be shipped; made-up labels go the same ways.",
    "no control group with a memory limit can be made here":
        "CI's containers may not make control groups; the reading of limits is tested on "
        "made-up files.",
    "no control group can be frozen here":
        "CI's containers may not make control groups; a process that is stopped is a test of its "
        "own.",
    "nothing can be mounted here":
        "CI's containers may not make mount namespaces; what is done where /dev/shm is full does not "
        "depend on who has mounted it.",
    "no name space can be made here":
        "CI's containers may not make name spaces; what decides without /proc is tested in C.",
    "the package index cannot be reached":
        "Without a network only the build without isolation can be tested.",
    r"this file system does not (tell|let go of) .*":
        "What a file system keeps in the page cache is its own affair.",
    "Python has a GIL":
        "There is nothing to see: only builds without it can have it switched on.",
    # what does not apply to one of several loaders that a test is for
    "torch waits for ever: .*":
        "A fault of torch's own, by which its loader would hang in the test.",
    "its workers look for their parent now and then, and may stay":
        "torch's workers do not notice at once that their trainer was killed.",
    "static workers are not replaced":
        "A static worker's random stream dies with it, so there is nothing to try again.",
    "samples go to whichever worker is free":
        "The test is of the fixed share that each of torch's and the static workers has.",
    "samples, not workers, are seeded":
        "Only workers have the streams that the test is of.",
    "workers are seeded":
        "Only samples have the streams that the test is of.",
    "persistent workers need workers":
        "Torch refuses the two options together.",
    "not for iterable datasets":
        "The option is refused for them, which has a test of its own.",
    "static workers are processes":
        "The test is of threads.",
    # left to longer runs
    "one of many alike: set MINATO_STRESS_SECONDS":
        "The rest of the table takes minutes and is run by make stress.",
}


def is_listed(reason: str) -> bool:
    return any(re.fullmatch(pattern, reason) for pattern in LISTED)
