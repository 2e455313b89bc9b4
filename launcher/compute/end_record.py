"""How a VM of a run has ended, as it stands in the run folder: one create-only object for each VM, by its number."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from launch_train.common import contract
from launch_train.common.storage import Storage
from launch_train.common.storage import UnreachableError as NoAnswer
from launcher.gcp.api import UnreachableError
from launcher.gcp.storage import use_errors


class Record(Struct, frozen=True, kw_only=True):
    """Times are Unix seconds; `ended` is None where whoever cancelled the run wrote it, whose clock may be off."""

    exit: int
    """Of the container; 70 (contract.Exit.UNFIT) where it was never started."""
    reason: str = ""
    """Why the container was never started."""
    name: str = ""
    zone: str = ""
    started: float | None = None
    ended: float | None = None
    cancelled: bool = False
    cleanup: str = ""
    """Why the VM could not delete itself, and the grant that it lacks."""


def read(folder: Storage, number: str) -> Record | None:
    """What the record of a VM says; None: there is none yet, or none that can be understood.

    Raises:
        UnreachableError: not now. UsageError, NotAuthorised: the run folder can't be used.
    """
    name = contract.machine_end(number)
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
    """All records of a run, by the VM's number. Raises as `read` does."""
    with use_errors():
        names = folder.list(f"{contract.MACHINES}/")
    numbers = [name.rpartition("/")[2].removesuffix(".json") for name in names]
    found = {number: read(folder, number) for number in numbers}
    return {number: record for number, record in found.items() if record is not None}


def create(folder: Storage, number: str, record: Record) -> bool:
    """Write the record of a VM; False: there is one already, and that one holds. Raises as `read` does."""
    try:
        with use_errors():
            folder.write(contract.machine_end(number), msgspec.json.encode(record), create=True)
    except FileExistsError:
        return False
    except Exception as error:
        if isinstance(error.__cause__, NoAnswer):
            raise UnreachableError(str(error.__cause__), "Try again in a moment.") from error
        raise
    return True
