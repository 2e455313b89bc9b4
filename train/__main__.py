"""One process of a run: `torchrun … -m train`, or `python -m train` alone. Its settings are JSON in LAUNCH_CONFIG."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any, NoReturn

from train import contract
from train.config import parse
from train.ending import leave
from train.errors import ConfigError, TrainError


def main() -> NoReturn:
    """Settings are checked before torch, which takes seconds to load."""
    rank = int(os.environ.get("RANK") or 0)
    try:
        config = parse(read_config(os.environ.get(contract.CONFIG) or "{}"))
        from train import dist, loop

        ranks = dist.join(os.environ)
        loop.train(config, ranks, os.environ)
        dist.finish(ranks)
    except TrainError as error:
        if rank == 0:
            print(f"train: {error}", file=sys.stderr)
        code = int(error.exit)
    except KeyboardInterrupt:
        code = 130  # 128 + SIGINT
    except BaseException:  # noqa: BLE001 - the process ends here, whatever it was, and by os._exit
        traceback.print_exc()
        code = int(contract.Exit.FAILED)
    leave(code, rank=rank)


def read_config(text: str) -> dict[str, Any]:
    """LAUNCH_CONFIG. Raises ConfigError if it isn't a JSON object."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{contract.CONFIG} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{contract.CONFIG} is not a JSON object: {text[:60]}")
    return config


if __name__ == "__main__":
    main()
