"""JSON and YAML on stdout: one document for each command."""

from __future__ import annotations

import json
from typing import Any

from launcher.cli.options import Output


def printed(data: dict[str, Any], output: Output) -> None:
    """Print a document as JSON or YAML."""
    from launcher.cli.show import as_yaml

    print(json.dumps(data, indent=2, ensure_ascii=False) if output is Output.json else as_yaml(data))
