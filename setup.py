"""Build of the extensions; everything else is in pyproject.toml.

MINATO_WERROR=1 turns warnings into errors (development), MINATO_FAULTS=1 compiles in the
fault points of the kill tests, MINATO_SANITIZE=address,undefined (or thread) builds with
sanitizers, MINATO_OPTIMIZE replaces -O3.
"""

import os
import sysconfig
from glob import glob

import numpy
from setuptools import Extension, setup

flags = ["-std=c11", os.environ.get("MINATO_OPTIMIZE", "-O3"), "-fvisibility=hidden"]
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


headers = sources("csrc/**/*.h")
core = [
    f
    for f in sources("csrc/base/*.c", "csrc/os/*.c", "csrc/sync/*.c", "csrc/load/*.c", "csrc/py/*.c")
    if not os.path.basename(f).startswith("mn_ops")
]
ops = sources("csrc/base/*.c", "csrc/os/*.c", "csrc/ops/*.c", "csrc/py/mn_ops*.c")

extensions = [
    Extension(
        "minato._core",
        core,
        include_dirs=["csrc", numpy.get_include()],
        extra_compile_args=flags,
        extra_link_args=[*links, "-pthread"],
        depends=headers,
    )
]
if glob("csrc/py/mn_ops*.c"):
    extensions.append(
        Extension(
            "minato._ops",
            ops,
            include_dirs=["csrc", "csrc/ops/include", numpy.get_include()],
            extra_compile_args=flags,
            extra_link_args=[*links, "-pthread", "-lm"],
            depends=headers,
        )
    )

setup(ext_modules=extensions)
