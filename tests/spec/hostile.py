"""Files that mean harm, by name. Run as a program, it reads each of them (paths as arguments) under a limit of 200 MB
and prints, as JSON, the CPU seconds and the problems of each.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

LIMIT = 200 * 10**6
SMALL = b"name: a\nmachine: {type: h100}\n"


def alias_bomb() -> bytes:
    """384 bytes that a loader with aliases makes a list of 8^9 items of."""
    lines = [b"a0: &a0 [x,x,x,x,x,x,x,x]"]
    lines += [b"a%d: &a%d [%s]" % (i, i, b",".join([b"*a%d" % (i - 1)] * 8)) for i in range(1, 9)]
    return b"\n".join(lines).ljust(383) + b"\n"


def merge_bomb() -> bytes:
    """648 bytes whose merge keys take exponential time."""
    lines = [b"a0: &a0 {x: 1}"]
    lines += [b"a%d: &a%d {<<: [%s]}" % (i, i, b",".join([b"*a%d" % (i - 1)] * 10)) for i in range(1, 11)]
    return b"\n".join(lines).ljust(647) + b"\n"


FILES = {
    "alias bomb": alias_bomb(),
    "merge bomb": merge_bomb(),
    "nested lists": b"[" * 50_000,
    "nested maps": b"{" * 50_000,
    "nested blocks": b"- " * 50_000,
    "nested keys": b"? " * 50_000,
    "nested pairs": b"[a: " * 50_000,
    "duplicate keys": SMALL + b"name: b\n",
    "many duplicate keys": b"a: 1\n" * 40_000,
    "NUL": SMALL + b"output: \0\n",
    "invalid UTF-8": SMALL + b"output: \xc3\x28\n",
    "UTF-16": SMALL.decode().encode("utf-16"),
    "a tag": SMALL + b"output: !!python/object/apply:os.system ['exit 3']\n",
    "nan as a limit": SMALL + b"limits: {usd: .nan}\n",
    "a long name": b"name: " + b"a" * 65_536 + b"\nmachine: {type: h100}\n",
    "a long pattern": SMALL + b"image: {repository: " + b"a" * 100_000 + b"}\n",
    "a long key": SMALL + b"? " + b"a" * 100_000 + b"\n: 1\n",
    "a long anchor": b"&" + b"a" * 100_000 + b" b: 1\n",
    "a long number": SMALL + b"limits: {usd: " + b"9" * 100_000 + b"}\n",
    "a long version": b"%YAML 1." + b"9" * 5_000 + b"\n---\na: 1\n",
    "a character beyond all": SMALL + b'output: "\\UFFFFFFFF"\n',
    "half a character": SMALL + b'output: "\\uD800"\n',
    "many values": b"a: [" + b"1," * 120_000 + b"]\n",
    "many unknown keys": b"".join(b"k%d: 1\n" % i for i in range(4_000)),
    "many near keys": b"name: a\nmachine: {" + b",".join(b"gpu%d: 1" % i for i in range(4_000)) + b"}\n",
    "many bad variables": SMALL + b"env: {" + b",".join(b"-%d-: [1]" % i for i in range(4_000)) + b"}\n",
    "many directives": b"%FOO\n" * 50_000,
    "many comments": b"#\n" * 120_000 + b"a: 1\n",
    "many lines of text": b"a: x\n" + b" x\n" * 80_000,
    "many escapes": b'a: "' + b"\\x41" * 60_000 + b'"\n',
    "many documents": b"---\n" * 60_000,
    "secret-like values": SMALL + b"env: {" + b",".join(b"K%d_KEY: %s" % (i, b"a" * 2_000) for i in range(79)) + b"}\n",
    "one secret-like value": SMALL + b"env: {A_TOKEN: " + b"a$" * 100_000 + b"}\n",
    "an address of a secret": SMALL + b"env: {A_TOKEN: " + b"a" * 200_000 + b"://}\n",
    "empty": b"",
    "spaces": b" " * 200_000,
    "a list": b"- name: a\n",
    "text": b"hello\n",
    "null": b"~\n",
    "too large": b"#" * (256 * 1024 + 1),
}


def main(paths: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    from launcher.errors import SpecError
    from launcher.spec.reader import read

    for path in paths:
        start, found, message = time.process_time(), ["it was read"], ""
        try:
            read(Path(path))
        except SpecError as error:
            found, message = [str(problem) for problem in error.problems], error.problem
        known = {"path": path, "seconds": time.process_time() - start, "problems": found}
        print(json.dumps({**known, "lines": message.count("\n") + 1, "characters": len(message)}))


if __name__ == "__main__":
    main(sys.argv[1:])
