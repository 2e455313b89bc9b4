"""The spec that `launch init` writes: it runs unchanged, and its comments explain each line."""

from __future__ import annotations

STARTER = """\
# yaml-language-server: $schema=schema.json
# (Run `launch schema > schema.json` to let your editor complete and check this file.)
#
# Run it on this machine:        launch local THIS_FILE
# Show the request and its cost: launch vertex THIS_FILE --dry-run
# (needs a project:              gcloud config set project PROJECT, or export CLOUDSDK_CORE_PROJECT=PROJECT)

name: my-first-run             # run IDs start with it: a-z, 0-9 and -

machine:
  type: l4                     # a GPU (h100, a100-80gb, l4 …) or a machine type (g2-standard-24)
  gpus: 2                      # GPUs per machine
  nodes: 1                     # number of machines

# Provisioning models, in fallback order. Two have a discount, which depends on the machine: flex-start waits for
# capacity; spot can be preempted at any time, and its price changes up to once a day. standard costs the list price.
provisioning: [flex-start, spot]

# Regions, in fallback order. `any` means all regions that have the machine, cheapest first.
regions: [us-central1, us-east4]

run:
  # The program. Default: the built-in trainer, with the settings below. To run your own script instead:
  #   script: my_train.py      # a Python file beside this spec, started by torchrun with one process per GPU
  #   args: [--epochs, 3]
  config:
    model: gpt                 # a small GPT (4 layers, width 128); gpt2-124m is the full GPT-2
    data: python-stdlib        # the source code of Python's standard library: available on every machine
    steps: 300                 # optimizer steps
    batch_size: 24             # sequences per step, over all GPUs
    optimizer: {lr: 1e-3}      # peak learning rate, after the warm-up

# image:                       # launch builds it: PyTorch, your packages, your code (docs/containers.md)
#   code: .                    # the folder with your code; default with `run.script`: this folder
#   requirements: requirements.txt                    # or pyproject.toml: its [project] dependencies
#   repository: us-docker.pkg.dev/my-project/launch   # default: us-docker.pkg.dev/PROJECT/launch

env:                           # environment variables; values are text, exactly as written
  NCCL_DEBUG: WARN

# secrets:                     # references to Secret Manager, read on the machine by identity.service_account
#   HF_TOKEN: projects/my-project/secrets/hf-token/versions/latest

# output: gs://my-bucket/runs  # where metrics and checkpoints are written; default: gs://PROJECT-launch/runs

limits:
  hours: 2                     # billed hours of the run; launch stops it after that
  usd: 20                      # a run that could cost more is not started
  wait: 6h                     # maximum wait for capacity, in each attempt
  wait_total: 12h              # maximum wait for capacity, over all attempts
"""
