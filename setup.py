"""The optional C extension; everything else is declared in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup

source = Path("kernels/_batch_copy.c")
setup(
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    ext_modules=[
        Extension(
            "epd.kernels._batch_copy",
            [str(source)],
            libraries=["dl"],
            py_limited_api=True,
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            optional=True,
        )
    ]
    if source.exists()
    else [],
)
