"""Builds threshold.c, which needs only minato/ops.h and Python's headers."""

from setuptools import Extension, setup

import minato

setup(
    name="threshold-operator",
    version="1",
    ext_modules=[
        Extension("threshold_operator", ["threshold.c"], include_dirs=[minato.get_include()])
    ],
)
