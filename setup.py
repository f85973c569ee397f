"""Compiles what the scheduler does in every order, where a wheel is built.

`pip install .` translates those modules to C with mypyc, which about halves the time per order and
changes none; where that does not work, for there is no C compiler, the wheel has the same modules
as plain Python. LOCKSTEP_COMPILE=1: it has to work; 0: it is not tried. An editable install is
always plain: what is edited is what runs.

Classes that other processes are sent (messages, status, config) stay plain: those of a compiled
module are not pickled.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

WANTED = os.environ.get("LOCKSTEP_COMPILE", "")

COMPILED = (
    "acceptance",
    "admission",
    "balance",
    "blame",
    "cost_model",
    "cutting",
    "dispatching",
    "ending",
    "fit",
    "goodput",
    "grouping",
    "lags",
    "narrowing",
    "near_lengths",
    "open_replicas",
    "ordered",
    "batches",
    "placement",
    "pool",
    "prefilling",
    "prefixes",
    "rates",
    "residents",
    "scheduler",
    "sequence",
    "shelf",
    "speculation",
    "waiting",
)


ARGUMENTS = [
    "-Wno-error",
    # Round twice in a * b + c, as Python does: a compiled scheduler decides as a plain one.
    "-ffp-contract=off",
]


def extensions() -> list[Extension]:
    if "bdist_wheel" not in sys.argv or WANTED == "0":
        return []
    try:
        from mypyc.build import mypycify

        # Without the project's settings, and without what it imports: here only C is wanted of it.
        settings = ["--config-file=", "--ignore-missing-imports"]
        modules = mypycify([*settings, *(f"scheduler/{name}.py" for name in COMPILED)])
    except (ImportError, SystemExit) as error:
        if WANTED == "1":
            raise
        print(f"the scheduler stays plain Python: mypyc: {error}", file=sys.stderr)
        return []
    for each in modules:
        each.extra_compile_args = [*each.extra_compile_args, *ARGUMENTS]
    return modules


class AllOrNone(build_ext):
    """The modules share one library: if anything is missing all of them stay plain."""

    def run(self) -> None:
        self._remove_built()
        try:
            super().run()
        except (BaseError, CCompilerError) as error:
            if WANTED == "1":
                raise
            print(f"the scheduler stays plain Python: {error}", file=sys.stderr)
            self._remove_built()
            self.extensions = []

    def _remove_built(self) -> None:
        """Those of an earlier build are of other sources."""
        for one in Path(self.build_lib).glob("**/*.so"):
            one.unlink()


setup(ext_modules=extensions(), cmdclass={"build_ext": AllOrNone})
