"""How users build their own operators: only the header is needed."""
from setuptools import Extension, setup

import minato

setup(name="mirror-operator", version="1",
      ext_modules=[Extension("mirror_operator", ["mirror_operator.c"],
                             include_dirs=[minato.get_include()],
                             extra_compile_args=["-std=c11", "-Wall", "-Wextra", "-Werror"])])
