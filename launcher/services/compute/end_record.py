"""Records of how a run's VMs ended: one create-only object per VM in the run folder, named by the VM's number."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from launch_train import runfolder
from launch_train.common.storage import Storage
from launch_train.common.storage import UnreachableError as NoAnswer
from launcher.gcp.api import UnreachableError
from launcher.gcp.storage import use_errors


class Record(Struct, frozen=True, kw_only=True):
    """The end of a VM. Times are Unix seconds.

    `ended` is None in the record of a cancellation, because the clock of the machine that wrote it may be wrong.
    """

    exit: int
    """The container's exit code; 70 (contract.Exit.UNFIT) if it never started."""
    reason: str = ""
    """Why the container never started."""
    name: str = ""
    zone: str = ""
    started: float | None = None
    ended: float | None = None
    cancelled: bool = False
    cleanup: str = ""
    """Why the VM could not delete itself, and the missing grant."""


def read(folder: Storage, number: str) -> Record | None:
    """Return the record of a VM; None: it does not exist or is malformed.

    Raises:
        UnreachableError: no answer. UsageError, NotAuthorised: the run folder can't be used.
    """
    name = runfolder.machine_end(number)
    try:
        with use_errors():
            record = msgspec.json.decode(folder.read(name), type=Record)
            return record if record.ended else msgspec.structs.replace(record, ended=folder.written(name))
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    except Exception as error:
        if isinstance(error.__cause__, NoAnswer):
            raise UnreachableError(str(error.__cause__), "Try again in a moment.") from error
        raise


def read_all(folder: Storage) -> dict[str, Record]:
    """Return all records of a run by VM number. Raises as `read` does."""
    with use_errors():
        names = folder.list(f"{runfolder.MACHINES}/")
    numbers = [name.rpartition("/")[2].removesuffix(".json") for name in names]
    records = {number: read(folder, number) for number in numbers}
    return {number: record for number, record in records.items() if record is not None}


def create(folder: Storage, number: str, record: Record) -> bool:
    """Write the record of a VM; return False if one exists, which is kept. Raises as `read` does."""
    try:
        with use_errors():
            folder.write(runfolder.machine_end(number), msgspec.json.encode(record), create=True)
    except FileExistsError:
        return False
    except Exception as error:
        if isinstance(error.__cause__, NoAnswer):
            raise UnreachableError(str(error.__cause__), "Try again in a moment.") from error
        raise
    return True
