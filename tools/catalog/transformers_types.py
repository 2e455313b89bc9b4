"""Tabulate the model types of the installed transformers with the trainer's tasks that each has a head for.

`python -m tools.catalog.transformers_types` writes launcher/catalog/data/transformers_types.csv. Run it when
containers/requirements.lock has another version of transformers.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "launcher/catalog/data/transformers_types.csv"


def table() -> str:
    """Return the CSV's text."""
    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    from launch_train.models.hugging_face import HEADS

    heads = {task: getattr(modeling_auto, names) for task, (_, names) in HEADS.items()}
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("type", "tasks", "source", "certainty"))
    for name in sorted(configuration_auto.CONFIG_MAPPING.keys()):
        tasks = " ".join(task for task, types in heads.items() if name in types)
        rows.writerow((name, tasks, f"TRANSFORMERS {transformers.__version__}", "A"))
    return text.getvalue()


if __name__ == "__main__":
    DATA.write_text(table(), encoding="utf-8")
