"""Write the report of a run folder into it: `python -m launch_train.report FOLDER`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launch_train import runfolder
from launch_train.common.storage import open_storage
from launch_train.report import page
from launch_train.runfolder.run import read_run


def main(arguments: Sequence[str]) -> int:
    (folder,) = arguments
    try:
        storage = open_storage(folder)
        storage.write(runfolder.REPORT, page([read_run(storage)]).encode())
    except Exception as error:  # noqa: BLE001 - a script's metrics may hold anything, and the run must not suffer
        print(f"launch: report not written: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
