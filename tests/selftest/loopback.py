"""`python -m tests.selftest.loopback BUNDLE`: run the selftest against the loopback cloud, and print where its answers
differ from those in a bundle.

Without its SSH step, which needs a server of its own.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import launcher.clock
from tests.selftest.comparison import differences, read_bundle
from tests.selftest.world import World, opened


def main(bundle: Path) -> None:
    """Print the differences, a line each."""
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as world:
        launcher.clock.REAL = world.time  # type: ignore[misc]  # Final for the product; this process runs on a fake clock
        print(recorded(world), file=sys.stderr)
        (ours,) = Path(folder).glob("launch-selftest-*.zip")
        lines = [*differences(read_bundle(bundle)[1], read_bundle(ours)[1])]
    print("\n".join(lines) if lines else "The loopback cloud's answers have the same fields and types.")


def recorded(world: World) -> str:
    """Run all of it; what was printed. Where nobody finds ssh and gcloud, the SSH step fails at once."""
    world.env["PATH"] = "/nonexistent"
    return world.selftest().shown


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
