"""Build of the extensions; everything else is in pyproject.toml.

MINATO_WERROR=1 turns warnings into errors (development). MINATO_FAULTS=1 compiles in the
fault points of the kill tests. MINATO_SANITIZE=address,undefined (or thread) builds with
sanitizers. MINATO_OPTIMIZE replaces -O3. MINATO_TORCH=0 leaves out the optional torch extension,
and MINATO_CUDA=0 the kernels for CUDA devices. Builds in the source tree (pip
install -e, build_ext --inplace) also include functions that only tests call;
MINATO_TEST_BINDINGS=1 includes them anywhere, and 0 nowhere.
"""

import copy
import gzip
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from glob import glob

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

C_ONLY = ["-std=c11", "-Wstrict-prototypes", "-Wmissing-prototypes"]
flags = ["-std=c11", os.environ.get("MINATO_OPTIMIZE", "-O3"), "-fvisibility=hidden"]
# Python's own flags disable assertions. Here assertions stop a loader that would otherwise deliver
# wrong bytes, and cost one comparison per task.
flags.append("-UNDEBUG")
flags += ["-Wall", "-Wextra", "-Wshadow"]
flags += ["-Wstrict-prototypes", "-Wmissing-prototypes"]
# Warnings in headers of other projects are not turned into errors.
for folder in (sysconfig.get_path("include"), numpy.get_include()):
    flags += ["-isystem", folder]
if "SOURCE_DATE_EPOCH" in os.environ:  # keep the build folder and the environment's folder out
    flags.append(f"-ffile-prefix-map={os.getcwd()}=.")  # of the output
    flags.append(f"-ffile-prefix-map={sys.prefix}=environment")  # the last match counts
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
        extra_link_args=[*links, "-pthread", "-lm"],
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
            extra_link_args=[*links, "-pthread", "-lm", "-ldl"],
            depends=headers,
        )
    )

extensions.append(
    Extension(
        "minato._cache",
        sources("csrc/base/*.c", "csrc/os/*.c", "csrc/cache/*.c", "csrc/py/cache/*.c"),
        include_dirs=["csrc"],
        extra_compile_args=flags,
        extra_link_args=[*links, "-pthread"],
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
    extensions.insert(
        0,  # it takes longest
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
            optional=True,  # without a C++ compiler the loader still works
        ),
    )

CUDA_SOURCE = "csrc/cuda/mn_finish.cu"
#: nvcc's flags for the same bytes as on a CPU: no fused multiply-add, no flushed denormals,
#: exactly rounded divisions and roots
CUDA_FLAGS = [
    *("-std=c++17", "-O3", "-Icsrc", "-Iminato/include", "-fmad=false", "-ftz=false"),
    *("-prec-div=true", "-prec-sqrt=true", "-Wno-deprecated-gpu-targets", "--no-compress"),
]
#: Code for one major number runs on all devices of its minor numbers. The oldest is also included
#: in a form that a driver can translate for any later device.
CUDA_MACHINES = ["70", "75", "80", "90", "100", "110", "120"]


class BuildKernels(build_ext):
    """Builds the extensions at the same time and, if nvcc exists, the kernels: a file of code for
    devices that the driver loads at run time. No other part needs it."""

    KERNELS = "minato/device/kernels.fatbin"

    def initialize_options(self):
        super().initialize_options()
        self.parallel = os.cpu_count()

    def build_extension(self, ext):
        own = copy.copy(self)  # several extensions compile the same files, with their own flags
        own.build_temp = os.path.join(self.build_temp, ext.name)
        build_ext.build_extension(own, ext)

    def run(self):
        super().run()
        nvcc = os.environ.get("NVCC") or shutil.which("nvcc")
        target = self.KERNELS if self.inplace else os.path.join(self.build_lib, self.KERNELS)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        wanted = nvcc is not None and os.environ.get("MINATO_CUDA", "1") != "0"
        if os.path.exists(target):
            made = os.path.getmtime(target)
            if wanted and all(os.path.getmtime(f) < made for f in [CUDA_SOURCE, *headers]):
                return
            os.remove(target)
        if not wanted:
            print("minato: no kernels for CUDA devices are built, for want of nvcc")
            return
        try:
            self.compile_kernels(nvcc, target)
        except (OSError, subprocess.CalledProcessError) as error:
            if os.environ.get("MINATO_WERROR"):
                raise
            print(f"minato: the kernels for CUDA devices are left out: {error}")

    def compile_kernels(self, nvcc, target):
        known = subprocess.check_output([nvcc, "--list-gpu-arch"], text=True).split()
        machines = [m for m in CUDA_MACHINES if f"compute_{m}" in known]
        if not machines:
            raise OSError(f"{nvcc} knows none of the machines {', '.join(CUDA_MACHINES)}")
        codes = [f"-gencode=arch=compute_{m},code=sm_{m}" for m in machines]
        codes.append(f"-gencode=arch=compute_{machines[0]},code=compute_{machines[0]}")
        warnings = ["-Werror", "all-warnings"] if os.environ.get("MINATO_WERROR") else []
        command = [nvcc, *CUDA_FLAGS, *warnings, *codes, "-fatbin", CUDA_SOURCE]
        fresh = f"{target}.{os.getpid()}"  # written atomically: a later build uses existing files
        try:
            subprocess.run([*command, "-o", fresh], check=True)
            os.replace(fresh, target)
        finally:
            if os.path.exists(fresh):
                os.remove(fresh)

    def get_outputs(self):
        built = os.path.join(self.build_lib, self.KERNELS)
        return super().get_outputs() + ([built] if os.path.exists(built) else [])


class PackSources(sdist):
    """Makes archives reproducible: the same sources give the same bytes, if SOURCE_DATE_EPOCH
    sets a time for all files, as it does for wheels."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, **others):
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is None or format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, **others)

        def anybodys(info):
            info.mtime, info.mode = int(epoch), 0o755 if info.mode & 0o100 else 0o644
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            return info

        name = base_name + ".tar.gz"
        with (
            open(name, "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=int(epoch)) as packed,
            tarfile.open(fileobj=packed, mode="w") as tar,
        ):
            tar.add(base_dir, filter=anybodys)  # in alphabetical order
        return name


# The engine is written for Linux. On other systems the package is Python only, and torch's own
# loader is used (minato/_not_linux.py), so a program for a Linux machine also runs on a laptop.
pure = sys.platform != "linux" or os.environ.get("MINATO_PURE", "0") != "0"
setup(
    ext_modules=[] if pure else extensions,
    cmdclass={"build_ext": BuildKernels, "sdist": PackSources},
)
