"""Compiles what the scheduler does in every order, where a wheel is built.

`pip install .` translates those modules to C with mypyc; where there is no C compiler the wheel has
the same modules as plain Python, which takes twice as long per order and gives the same orders. An
editable install is always plain: what is edited is what runs. LOCKSTEP_COMPILE=0 leaves a wheel
plain.

Classes that other processes are sent (messages, status, config) stay plain: those of a compiled
module are not pickled.
"""

import os
import sys

from setuptools import Extension, setup

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
    "orders",
    "placement",
    "pool",
    "prefilling",
    "prefixes",
    "rates",
    "residents",
    "scheduler",
    "sequence",
    "speculation",
    "waiting",
)


def extensions() -> list[Extension]:
    if "bdist_wheel" not in sys.argv or os.environ.get("LOCKSTEP_COMPILE") == "0":
        return []
    from mypyc.build import mypycify

    # Without the project's settings, and without what it imports: here only C is wanted of it.
    settings = ["--config-file=", "--ignore-missing-imports"]
    modules = mypycify([*settings, *(f"scheduler/{name}.py" for name in COMPILED)])
    for each in modules:
        each.optional = True
    return modules


setup(ext_modules=extensions())
