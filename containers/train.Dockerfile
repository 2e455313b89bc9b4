# The training image, in three stages from what changes least to what changes most:
#   build         PyTorch for one CUDA variant and our packages, in a virtual environment; never pushed
#   dependencies  the base, that environment and the user's requirements: an image of its own, kept for months
#   train         launch_train, then the user's code: all that an edit sends
# launch can also append the last stage's two layers to `dependencies` in the registry; they hold the same files.
#
# PyTorch's wheels bring CUDA's libraries, so the base is plain Python, 3.11 or later; the machine brings the driver.
# The build context holds this file, the locks, torch/ (a PyTorch wheel of the user's own, or nothing),
# requirements.txt (the user's; may be empty), launch_train/ and code/ (may be empty).
ARG BASE=docker.io/library/python:3.12-slim-bookworm
# cu126 reaches P4 to H100, cu130 T4 to Blackwell: the plan picks by the machine, never by the host that builds.
ARG WHEEL=cu126
ARG TORCH=2.13.0


FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_PROGRESS_BAR=off
WORKDIR /build
ARG WHEEL
ARG TORCH
COPY requirements.lock torch-*.lock ./
COPY torch ./torch

# First the lock with PyTorch's own dependencies in plain Python, so that the next step finds them, by their hashes.
# Then PyTorch: a wheel of the user's own, else by a lock (PyPI's wheels of this version are the cu130 build), else from
# PyTorch's index, which tells no hashes.
#
# The large packages are put apart, to become layers of their own: several are compressed, sent and fetched at once, and
# a GPU waits for the slowest. The CPU's PyTorch has neither CUDA nor Triton: those two stay empty.
RUN python3 -m venv /opt/venv \
 && /opt/venv/bin/pip install --require-hashes --requirement requirements.lock \
 && set -- torch/*.whl \
 && if [ -e "$1" ]; then \
      /opt/venv/bin/pip install "$1"; \
    elif [ -e "torch-${WHEEL}.lock" ]; then \
      /opt/venv/bin/pip install --require-hashes --requirement "torch-${WHEEL}.lock"; \
    else \
      echo "There is no lock for ${WHEEL}: PyTorch comes from download.pytorch.org, its hash unchecked" \
      && /opt/venv/bin/pip install "torch==${TORCH}" --index-url "https://download.pytorch.org/whl/${WHEEL}"; \
    fi \
 && /opt/venv/bin/pip check \
 && /opt/venv/bin/pip list --format freeze | grep "^torch==" > /opt/venv/constraints.txt \
 && cd /opt/venv \
 && ln -s lib/python3.*/site-packages site-packages \
 && for name in nvidia triton torch; do \
      mkdir "/opt/${name}" \
      && if [ -d "site-packages/${name}" ]; then mv "site-packages/${name}" "/opt/${name}/"; fi; \
    done


FROM ${BASE} AS dependencies
# Not a tool for builds: torch.compile's Triton compiles its launcher in C the first time a kernel runs. (Python's
# headers are in the base; one that has Debian's Python needs python3-dev for it.)
ARG WHEEL
RUN if [ "${WHEEL}" != cpu ]; then \
      apt-get update \
      && apt-get install --yes --no-install-recommends gcc libc6-dev \
      && rm -rf /var/cache/apt/* /var/lib/apt/lists/*; \
    fi

# No root: the code needs none, and what it writes outside the bucket stays its own. By number, since a base may have
# given this one to a user of its own. The group may write beside the code as well: a rehearsal runs as whoever asks,
# and that user joins the group.
RUN getent passwd 1000 || useradd --create-home --uid 1000 --user-group launch \
 && install --directory --owner 1000 --group 1000 --mode 775 /workspace

# A user's train.py must not hide our package: ours comes first, and no script folder goes in front of it. The user's
# code is the working directory: launch_train.node puts it behind the standard library, which it must not hide either.
ENV PATH=/opt/venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_PROGRESS_BAR=off \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONPATH=/opt/launch \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/nvidia /opt/venv/site-packages
COPY --from=build /opt/triton /opt/venv/site-packages
COPY --from=build /opt/torch /opt/venv/site-packages

# The constraint keeps a requirement from replacing this build of PyTorch. Packages that link against PyTorch must be
# built for the same variant: PyPI's torchvision is for CUDA 13 and fails at import beside a cu126 or cpu build. Those
# builds of PyTorch name their variant in their version, and PyTorch's index has the packages that match.
COPY requirements.txt /opt/venv/requirements.txt
RUN sed -nE 's,^torch==.*[+](cpu|cu[0-9]+)$,--extra-index-url https://download.pytorch.org/whl/\1,p' \
      /opt/venv/constraints.txt > /opt/venv/index.txt \
 && pip install --requirement /opt/venv/index.txt --requirement /opt/venv/requirements.txt \
      --constraint /opt/venv/constraints.txt

USER 1000:1000
WORKDIR /workspace
ENTRYPOINT ["python", "-m", "launch_train.node"]


FROM dependencies AS train
COPY launch_train /opt/launch/launch_train
COPY --chown=1000:1000 code /workspace
