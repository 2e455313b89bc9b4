"""scikit-learn in steps: partial_fit, a checkpoint of its own, and a printed line per step that the spec reads."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import joblib
import numpy as np
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss


def main(steps: int, folder: Path) -> None:
    saved = folder / "model.joblib"
    first, model = joblib.load(saved) if saved.exists() else (0, SGDClassifier(loss="log_loss", random_state=0))
    truth = np.random.default_rng(0).normal(size=20)
    for step in range(first + 1, steps + 1):
        draws = np.random.default_rng(step)
        x = draws.normal(size=(256, 20))
        y = (x @ truth + draws.normal(size=256) > 0).astype(int)
        model.partial_fit(x, y, classes=[0, 1])
        print(f"step {step}: loss {log_loss(y, model.predict_proba(x)):.4f}, accuracy {model.score(x, y):.3f}")
        if step % 20 == 0:
            folder.mkdir(parents=True, exist_ok=True)
            joblib.dump((step, model), saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    # On Vertex AI each bucket is a folder below /gcs.
    run = os.environ.get("LAUNCH_RUN_FOLDER", "out").replace("gs://", "/gcs/", 1)
    main(parser.parse_args().steps, Path(run) / "sklearn")
