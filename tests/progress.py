"""Runs parts of the tests, three at once, says every ten seconds how far each is, and sums them up.

    python -m tests.progress 'NAME: ARGUMENTS OF PYTEST' ...

A part is a process of pytest that writes to a file: a reader of a pipe would wait for every process
that a test left behind. What is said of a part is read from that file.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

AT_ONCE = 3
"""Two that compute, on two cores, and one whose tests mostly wait."""
LOGS = Path(".pytest_cache/make")
GRACE_S = 30.0
"""What an interrupted part has to stop what it began."""
_KINDS = {
    "failed": "F",
    "passed": ".",
    "skipped": "s",
    "xfailed": "x",
    "xpassed": "X",
    "error": "E",
}
"""In the order of pytest's last line, with the letter that pytest writes for a test."""


class Part:
    """Some of the tests, in a process that has begun."""

    def __init__(self, text: str) -> None:
        self.name, _, arguments = text.partition(":")
        self.log = LOGS / self.name
        self._begun_s = time.monotonic()
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-ra", "--color=no", *shlex.split(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C reaches it once, by `end`
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun_s

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def _letters(self) -> Counter[str]:
        """What pytest writes for each test that has ended."""
        lines = re.findall(r"^(?:\S+\.py )?([.FEsxX]+)(?: +\[ *\d+%\])?$", self.text, re.MULTILINE)
        return Counter("".join(lines))

    def progress(self) -> str:
        said = re.search(r"^collected (\d+) items?(?:.* (\d+) selected)?", self.text, re.MULTILINE)
        if said is None:
            return f"{self.name}: collecting, {self.seconds:.0f} s"
        each = self._letters()
        done = f"{each.total()} of {said[2] or said[1]} tests"
        return f"{self.name}: {done}, {each['F'] + each['E']} failed, {self.seconds:.0f} s"

    def counts(self) -> Counter[str]:
        """By pytest's last line, or by the letters if there is none.

        A part that broke off, or ended otherwise than by a failed test, has an error.
        """
        last = re.search(r"^=+ (.*) in [\d.]+s.* =+$", (self.text.splitlines() or [""])[-1])
        if last:
            found = re.findall(rf"(\d+) ({'|'.join(_KINDS)})", last[1])
            counts = Counter({kind: int(many) for many, kind in found})
        else:
            counts = Counter({kind: self._letters()[letter] for kind, letter in _KINDS.items()})
        if (self.process.returncode or not last) and not counts["failed"] + counts["error"]:
            counts["error"] = 1
        return counts

    def failures(self) -> str:
        """What pytest wrote of tests that failed, or all that it wrote if it broke off."""
        end = r"(?=^=+ (?:warnings|short test) summary)"
        found = re.search(rf"^=+ (?:ERRORS|FAILURES) =+$.*?{end}", self.text, re.M | re.S)
        return found[0] if found else self.text

    def end(self) -> None:
        """What it has said so far stays; it has some time to stop what it began."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def report(self) -> str:
        status = self.process.returncode
        how = f", status {status}" if status not in (0, 1) else ""
        return f"{self.name}: {closing(self.counts())} in {self.seconds:.0f} s{how}"


def closing(counts: Counter[str]) -> str:
    """In the words of pytest's last line."""
    said = [f"{counts[kind]} {kind}" for kind in _KINDS if counts[kind]]
    return ", ".join(said) + "s" * (counts["error"] > 1) or "no tests ran"


def run(texts: list[str], every_s: float, limit_s: float) -> tuple[Counter[str], list[str]]:
    """Run all parts; how many tests ended how, and lines of each part for the summary."""
    waiting, running, counts, lines = list(texts), list[Part](), Counter[str](), list[str]()
    said_s = time.monotonic()
    try:
        while running or waiting:
            while waiting and len(running) < AT_ONCE:
                running.append(Part(waiting.pop(0)))
            time.sleep(min(every_s, 0.1))
            if time.monotonic() - said_s >= every_s:
                said_s = time.monotonic()
                print(*(part.progress() for part in running), sep="\n", flush=True)
            for part in list(running):
                if part.seconds > limit_s:
                    print(f"{part.name}: not done within {limit_s:.0f} s", flush=True)
                    part.end()
                if part.process.poll() is not None:
                    running.remove(part)
                    counts += part.counts()
                    lines.append(part.report())
                    if part.counts()["failed"] + part.counts()["error"]:
                        print(part.failures())
                    print(lines[-1], flush=True)
    finally:
        for part in running:
            part.end()
    return counts, lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.progress")
    parser.add_argument("parts", nargs="+", help="'NAME: ARGUMENTS OF PYTEST'")
    parser.add_argument("--every-s", type=float, default=10.0, help="between two lines of a part")
    parser.add_argument("--limit-s", type=float, default=3000.0, help="of one part")
    parser.add_argument("--left-out", default="none", help="marks of the tests that do not run")
    options = parser.parse_args()
    for ends in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ends, signal.default_int_handler)
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    began_s = time.monotonic()
    try:
        counts, lines = run(options.parts, options.every_s, options.limit_s)
    except KeyboardInterrupt:
        print(f"interrupted; what the parts wrote is in {LOGS}")
        return 130
    for log in sorted(LOGS.iterdir()):
        lines += re.findall(r"^(?:FAILED|ERROR|SKIPPED) .*$", log.read_text(errors="replace"), re.M)
    print("", *lines, f"left out: tests marked {options.left_out}", sep="\n")
    seconds = time.monotonic() - began_s
    print(f"===== {closing(counts)} in {seconds:.2f}s ({timedelta(seconds=int(seconds))}) =====")
    return 1 if counts["failed"] + counts["error"] else 0


if __name__ == "__main__":
    sys.exit(main())
