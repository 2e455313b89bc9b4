"""`python -m tests.selftest.loopback BUNDLE`: the selftest against the loopback cloud, for `launch selftest --compare`.

Without its SSH step, which needs a server of its own.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import launcher.clock
from tests.selftest.world import World, opened


def main(bundle: Path) -> None:
    """Write the loopback cloud's bundle."""
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as world:
        launcher.clock.REAL = world.time  # type: ignore[misc]  # Final for the product; this process runs on a fake clock
        ran = recorded(world)
        print(ran, file=sys.stderr)
        (made,) = Path(folder).glob("launch-selftest-*.zip")
        shutil.copy(made, bundle)


def recorded(world: World) -> str:
    """Run all of it; what was printed. Where nobody finds ssh and gcloud, the SSH step fails at once."""
    world.env["PATH"] = "/nonexistent"
    return world.selftest().shown


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
