"""The price table of a plan: the shipped one, or a newer one that `launch prices --update` has fetched.

A fetched table is a folder in the user's cache, DATE-DIGEST, which is created atomically. A folder whose content
doesn't match its name is ignored.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Final

from launcher import catalog
from launcher.catalog import Catalog, PriceTable, tables
from launcher.errors import LaunchError

OFFLINE: Final = "LAUNCH_OFFLINE"
"""Environment variable; with the value 1, plans use the shipped prices."""
OLD_DAYS: Final = 30
"""Age at which prices are called old."""
TRUE: Final = ("1", "true", "yes", "on")


def priced_catalog(*, offline: bool = False) -> Catalog:
    """Return the catalog with the price table in use. Reads files only."""
    return catalog.load(table_in_use(os.environ, offline=offline))


def table_in_use(environ: Mapping[str, str], *, offline: bool = False) -> PriceTable | None:
    """Return the newest fetched table if it is newer than the shipped one; None: the shipped one."""
    if offline or environ.get(OFFLINE, "").lower() in TRUE:
        return None
    newest = next(fetched_tables(environ), None)
    return newest if newest and newest.date > catalog.load().price_table.date else None


def fetched_tables(environ: Mapping[str, str]) -> Iterator[PriceTable]:
    """Yield the intact tables of the cache, newest first."""
    folder = cache_folder(environ)
    try:
        names = sorted((path.name for path in folder.iterdir()), reverse=True) if folder else []
    except OSError:
        return
    for name in names:
        try:
            table = tables.price_table(str((folder or Path()) / name))
        except (OSError, ValueError, KeyError):
            continue
        if name == f"{table.date}-{table.digest}":
            yield table


def cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of the fetched tables; None if the user has no home folder."""
    if sys.platform == "win32":
        base = environ.get("LOCALAPPDATA", "")
    else:
        base = environ.get("XDG_CACHE_HOME") or (f"{environ['HOME']}/.cache" if environ.get("HOME") else "")
    return Path(base, "launch", "prices") if base else None


def store_tables(texts: Mapping[str, str], environ: Mapping[str, str]) -> PriceTable:
    """Store new tables (name -> CSV text) in the cache, remove older ones, and return the new one.

    Raises LaunchError: the cache cannot be written.
    """
    import shutil  # not needed by a plan
    import tempfile

    folder = cache_folder(environ)
    if folder is None:
        raise LaunchError("no cache folder for the prices: HOME is not set", "Set XDG_CACHE_HOME to a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".new-", dir=folder))
        for name, text in texts.items():
            (unfinished / f"{name}.csv").write_text(text, encoding="utf-8", newline="")
        table = tables.price_table(str(unfinished))
        target = folder / f"{table.date}-{table.digest}"
        if str(target) in (fetched.folder for fetched in fetched_tables(environ)):  # the same prices, again today
            shutil.rmtree(unfinished)
        else:
            shutil.rmtree(target, ignore_errors=True)  # damaged
            unfinished.rename(target)
        for other in folder.iterdir():
            if other != target:
                shutil.rmtree(other, ignore_errors=True)
    except OSError as error:
        raise LaunchError(f"cannot write the prices to {folder}: {error}", "Check the folder's permissions.") from error
    return tables.price_table(str(target))


def age_days(day: str, now: float) -> int:
    """Return the age of a table of `day` (2026-07-30) at `now` (Unix seconds), in days; negative if this machine's
    clock is behind."""
    return (datetime.fromtimestamp(now, UTC).date() - date.fromisoformat(day)).days


def is_old(day: str, now: float) -> bool:
    """Return whether prices are older than 30 days, or dated days after this machine's clock."""
    return not -1 <= age_days(day, now) <= OLD_DAYS
