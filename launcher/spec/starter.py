"""The spec that `launch init` writes: it runs as it is, and its comments explain every line."""

from __future__ import annotations

STARTER = """\
# yaml-language-server: $schema=schema.json
# (`launch schema > schema.json` lets your editor complete and check this file.)
#
# Try it here:                          launch local THIS_FILE
# See what is sent, and what it costs:  launch vertex THIS_FILE --dry-run
# The latter needs a project:           gcloud config set project PROJECT, or export CLOUDSDK_CORE_PROJECT=PROJECT

name: my-first-run             # the run's id starts with it: a-z, 0-9 and -

machine:
  type: l4                     # a GPU (h100, a100-80gb, l4 …) or a machine type (g2-standard-24)
  gpus: 2                      # GPUs on each machine
  nodes: 1                     # machines

# How the machines are had, tried in this order. Flex-start waits for capacity at a discount; Spot changes its price
# up to once a day and can be taken away at any time; standard is the list price.
provisioning: [flex-start, spot]

# Where, tried in this order. `any` is every region that has the machine, the cheapest first.
regions: [us-central1, us-east4]

run:
  # What runs. Left out, it is the built-in trainer with the settings below. Your own program instead:
  #   script: my_train.py      # a Python file beside this spec, started by torchrun, one process a GPU
  #   args: [--epochs, 3]
  config:
    model: gpt                 # a small GPT (4 layers of 128); gpt2-124m is the real one
    data: python-stdlib        # the source text of Python's standard library: real text that is on every machine
    steps: 300                 # optimizer steps
    batch_size: 24             # sequences a step, over all GPUs together
    optimizer: {lr: 1e-3}      # the peak, after the warm-up

# image:                       # launch makes it: PyTorch, your packages, your code (docs/containers.md)
#   code: .                    # the folder with your code; with `run.script` it is this one anyway
#   requirements: requirements.txt                    # or pyproject.toml: its [project] dependencies
#   repository: us-docker.pkg.dev/my-project/launch   # left out: us-docker.pkg.dev/PROJECT/launch

env:                           # environment variables; values are taken as they are written
  NCCL_DEBUG: WARN

# secrets:                     # read on the machine from Secret Manager by identity.service_account; no values here
#   HF_TOKEN: projects/my-project/secrets/hf-token/versions/latest

# output: gs://my-bucket/runs  # where metrics and checkpoints go; left out: gs://PROJECT-launch/runs

limits:
  hours: 2                     # billed time of the whole run; it is stopped after that
  usd: 20                      # refused if it could cost more
  wait: 6h                     # for capacity, in each attempt
"""


def starter() -> str:
    """The text of the starter spec."""
    return STARTER
