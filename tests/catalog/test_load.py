"""What loading costs, in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys

ASK_ALL = """
import json, sys, time
import msgspec
before = set(sys.modules)
from launcher import catalog
start = time.process_time()
found = catalog.load()
shape = found.find("h100", 2, None, "vertex")
found.regions(shape), found.vertex_regions(shape), found.zones(shape), found.nccl(shape, "vertex")
found.price(shape, "vertex", "spot", "us-central1"), found.quota(shape, "vertex", "spot"), found.image_family(shape)
spent = time.process_time() - start
start = time.process_time()
sum(number for number in range(100_000))
loop = time.process_time() - start
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps({"loops": spent / loop, "modules": sorted(new - set(sys.stdlib_module_names))}))
"""


def ask() -> tuple[float, list[str]]:
    """(CPU time of all tables and look-ups together, by that of a loop over 100,000 numbers; modules that aren't
    Python's own or msgspec)."""
    done = subprocess.run([sys.executable, "-c", ASK_ALL], check=True, capture_output=True, text=True)
    answer = json.loads(done.stdout)
    return answer["loops"], answer["modules"]


def test_nothing_but_the_standard_library_and_msgspec_is_loaded() -> None:
    assert ask()[1] == ["launch_train", "launcher"]  # of launch_train its texts, which need the standard library only


def test_all_tables_together_cost_as_much_as_a_short_loop() -> None:
    """The least of three: other processes on the machine only ever add."""
    assert min(ask()[0] for _ in range(3)) <= 2.5
