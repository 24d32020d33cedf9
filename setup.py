"""Build of the extensions; everything else is in pyproject.toml.

MINATO_WERROR=1 turns warnings into errors (development), MINATO_FAULTS=1 compiles in the
fault points of the kill tests, MINATO_SANITIZE=address,undefined (or thread) builds with
sanitizers, MINATO_OPTIMIZE replaces -O3, MINATO_TORCH=0 leaves the optional torch extension
out. What is built into the source tree (pip install -e, build_ext --inplace) also has
minato._policy and what else only the tests and the simulator call; MINATO_TEST_BINDINGS=1
builds these anywhere, and 0 nowhere.
"""

import os
import re
import sys
import sysconfig
from glob import glob

import numpy
from setuptools import Extension, setup

C_ONLY = ["-std=c11", "-Wstrict-prototypes", "-Wmissing-prototypes"]
flags = ["-std=c11", os.environ.get("MINATO_OPTIMIZE", "-O3"), "-fvisibility=hidden"]
# Python's own flags switch assertions off. Here they stop a loader that would otherwise hand
# out wrong bytes, and cost a comparison a task.
flags.append("-UNDEBUG")
flags += ["-Wall", "-Wextra", "-Wshadow"]
flags += ["-Wstrict-prototypes", "-Wmissing-prototypes"]
# Warnings inside other people's headers are not ours to turn into errors.
for folder in (sysconfig.get_path("include"), numpy.get_include()):
    flags += ["-isystem", folder]
links = []
if os.environ.get("MINATO_WERROR"):
    flags.append("-Werror")
if os.environ.get("MINATO_FAULTS"):
    flags.append("-DMN_FAULTS")
if os.environ.get("MINATO_SANITIZE"):
    flags += ["-g", "-fno-omit-frame-pointer", "-fsanitize=" + os.environ["MINATO_SANITIZE"]]
    links.append("-fsanitize=" + os.environ["MINATO_SANITIZE"])


def sources(*patterns):
    return sorted({f for p in patterns for f in glob(p, recursive=True)})


headers = sources("csrc/**/*.h", "minato/include/**/*.h")
core = sources(
    *(f"csrc/{floor}/*.c" for floor in "base os sync memory schedule workers engine".split()),
    *(f"csrc/py/{part}/*.c" for part in "module types transport seeding".split()),
    "csrc/py/ops/mn_ops_raise.c",  # both say what an operator's failure means
)
ops = sources("csrc/base/*.c", "csrc/os/*.c", "csrc/ops/*.c", "csrc/py/ops/*.c")

IN_TREE = {"--inplace", "-i", "develop", "editable_wheel"}
tests_too = os.environ.get("MINATO_TEST_BINDINGS", str(int(bool(IN_TREE & set(sys.argv))))) == "1"

extensions = [
    Extension(
        "minato._core",
        core,
        define_macros=[("MN_TEST_BINDINGS", "1")] if tests_too else [],
        include_dirs=["csrc", "minato/include", numpy.get_include()],
        extra_compile_args=flags,
        extra_link_args=[*links, "-pthread"],
        depends=headers,
    )
]
if glob("csrc/py/ops/*.c"):
    extensions.append(
        Extension(
            "minato._ops",
            ops,
            include_dirs=["csrc", "minato/include", numpy.get_include()],
            extra_compile_args=flags,
            extra_link_args=[*links, "-pthread", "-lm"],
            depends=headers,
        )
    )

if tests_too:
    extensions.append(
        Extension(
            "minato._policy",
            sources("csrc/base/*.c", "csrc/schedule/*.c", "csrc/py/policy/*.c"),
            include_dirs=["csrc"],
            extra_compile_args=flags,
            extra_link_args=links,
            depends=headers,
        )
    )


def installed_torch():
    """(folder, version) of a torch with headers, here or where the wheel will go, or None.

    An isolated build does not see the target's packages, but its sysconfig names their
    folder. Nothing is imported and nothing is downloaded.
    """
    for path in [*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]:
        folder = os.path.join(path, "torch")
        if os.path.exists(os.path.join(folder, "include/ATen/core/Tensor.h")):
            with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
                found = re.search(r"__version__ = '((\d+)\.(\d+)[^']*)'", file.read())
            # before 2.6, wheels were built with the other C++ string ABI
            if found and (int(found[2]), int(found[3])) >= (2, 6):
                return folder, f"{found[2]}.{found[3]}"
    return None


found = installed_torch() if os.environ.get("MINATO_TORCH", "1") != "0" else None
if found:
    folder, version = found
    extensions.append(
        Extension(
            "minato._torch",
            ["csrc/torch/mn_torch.cpp"],
            language="c++",
            include_dirs=["csrc"],
            extra_compile_args=[
                *(f for f in flags if f not in C_ONLY),
                *("-std=c++20", "-O2", "-g0", "-isystem", os.path.join(folder, "include")),
                f'-DMN_TORCH_VERSION="{version}"',
            ],
            library_dirs=[os.path.join(folder, "lib")],
            libraries=["torch_python", "torch_cpu", "c10"],
            extra_link_args=[*links, "-Wl,--version-script=csrc/torch/exports.map"],
            depends=["csrc/torch/exports.map", *headers],
            optional=True,  # without a C++ compiler the loader works all the same
        )
    )

# The engine is written for Linux. Elsewhere the package is Python alone, and torch's own
# loader serves (minato/_system.py): a program for a Linux machine then starts on a laptop.
pure = sys.platform != "linux" or os.environ.get("MINATO_PURE", "0") != "0"
setup(ext_modules=[] if pure else extensions)
