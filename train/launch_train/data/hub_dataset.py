"""Download a data set of the Hugging Face hub: its Parquet, Arrow and JSON Lines files. Needs huggingface_hub."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from launch_train.common.errors import UnfitError, UsageError
from launch_train.common.text import one_line
from launch_train.data.token_file import unfit

NAME: Final = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?(/(?P<pattern>.+))?")
"""hf:ORG/NAME, a revision (branch, tag or commit) after @, and the files wanted: hf:ORG/NAME@main/sample/*.parquet."""

CONVERTED: Final = "refs/convert/parquet"
"""The branch on which the hub keeps a Parquet copy of data sets in other formats."""

DATA: Final = (".parquet", ".arrow", ".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".bin", ".npy")
PATIENCE: Final = 10.0
"""Seconds to wait for the list of files."""


def fetch(name: str, cache: Path) -> str:
    """Download the files that `name` means (NAME), unless the hub's cache has them, and return a folder of links.

    Raises UsageError if there is no such data set, it may not be read, or has no such files; UnfitError if the hub
    can't be reached.
    """
    parts = NAME.fullmatch(name)
    if parts is None:
        raise UsageError(f"data: {name} is not a data set's name: hf:ORG/NAME, hf:ORG/NAME@REVISION/FOLDER/*.parquet")
    from huggingface_hub import constants, errors, snapshot_download

    repo, hub, give = parts["repo"], constants.ENDPOINT, "give a token in HF_TOKEN (secrets)"
    try:
        revision, files = _files(repo, parts["revision"], parts["pattern"])
        snapshot = snapshot_download(repo, repo_type="dataset", revision=revision, allow_patterns=files)
    except UsageError:
        raise
    except errors.GatedRepoError as error:
        raise UsageError(f"data: {name} is gated: accept its terms at {hub}/datasets/{repo}, and {give}") from error
    except errors.RevisionNotFoundError as error:
        none = f"the data set has no such revision, and no Parquet copy ({CONVERTED})"
        raise UsageError(f"data: {name}: {none}") from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(f"data: {name}: {hub} has no such data set, or it is private: {give}") from error
    except Exception as error:
        raise UnfitError(f"data: {name} can't be downloaded from {hub}: {one_line(error, 200)}") from error
    # A folder with these files alone: a snapshot also holds what was downloaded from it before.
    tree = cache / "trees" / hashlib.sha256("\n".join((snapshot, *files)).encode()).hexdigest()[:40]
    try:
        for file in files:
            link = tree / file
            link.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                link.symlink_to(Path(snapshot, file).resolve())
    except OSError as error:
        raise unfit(error, cache / "trees") from error
    return str(tree)


def _files(repo: str, revision: str | None, pattern: str | None) -> tuple[str, list[str]]:
    """Return the commit and the names of the wanted files in it; of the hub's Parquet copy if the data set has none.

    Raises UsageError if there are none, or if folders may hold the same text twice.
    """
    from huggingface_hub import HfApi

    for branch in (revision,) if revision else (None, CONVERTED):
        info = HfApi().dataset_info(repo, revision=branch, timeout=PATIENCE)
        names = [sibling.rfilename for sibling in info.siblings or ()]
        files = [name for name in names if (fnmatchcase(name, pattern) if pattern else name.endswith(DATA))]
        if files:
            break
    else:
        wanted = pattern or f"files of data ({', '.join(DATA)})"
        at = f"@{revision}" if revision else ""
        named = f"hf:{repo}{at}{f'/{pattern}' if pattern else ''}"
        raise UsageError(f"data: {named}: the hub has no {wanted} in it: name them, hf:{repo}/FOLDER/*.parquet")
    folders = sorted({file.partition("/")[0] for file in files if "/" in file})
    if not pattern and len(folders) > 1 and not any("train" in folder for folder in folders):  # they are not splits
        some = ", ".join(folders[:6])
        raise UsageError(f"data: hf:{repo} has the folders {some}: choose one, hf:{repo}/{folders[0]}/*")
    return str(info.sha), files
