"""`launch schema`: print the JSON Schema of a spec, for editors."""

from __future__ import annotations

import json

from launcher.spec.schema import json_schema


def schema() -> None:
    """Print the JSON Schema of a spec, for editors."""
    print(json.dumps(json_schema(), indent=2))
