"""A program without torch: logistic regression by gradient descent in NumPy, where TensorFlow or Keras could stand.

By hand: python fit.py. What is launch's in it is one line: metrics.log.
"""

from __future__ import annotations

import argparse

import numpy as np

from launch_train import metrics


def main(steps: int, lr: float) -> None:
    inputs, labels = data(samples=2000, features=8)
    weights = np.zeros(inputs.shape[1])
    for step in range(1, steps + 1):
        likely = 1 / (1 + np.exp(-inputs @ weights))
        loss = -np.mean(labels * np.log(likely) + (1 - labels) * np.log(1 - likely))
        weights -= lr * inputs.T @ (likely - labels) / len(labels)
        accuracy = np.mean((likely > 0.5) == labels)
        metrics.log(step, loss=loss, accuracy=accuracy)
        if step % 20 == 0:
            print(f"step {step}: loss {loss:.4f}, accuracy {accuracy:.3f}", flush=True)


def data(samples: int, features: int) -> tuple[np.ndarray, np.ndarray]:
    """Points on both sides of a plane, with some on the wrong one."""
    draws = np.random.default_rng(0)
    inputs = draws.normal(size=(samples, features))
    right = inputs @ draws.normal(size=features) + draws.normal(scale=0.5, size=samples)
    return inputs, (right > 0).astype(float)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1.0)
    main(**vars(parser.parse_args()))
