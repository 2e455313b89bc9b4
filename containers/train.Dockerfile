# The training image, in three stages ordered by how often they change:
#   build         PyTorch for one CUDA variant and the locked packages, in a virtual environment; never pushed
#   dependencies  the base, that environment and the user's requirements; pushed as a separate image, kept for months
#   train         launch_train, then the user's code: the only layers that an edit uploads
# launch can also append the two layers of the last stage to `dependencies` in the registry; the files are the same.
#
# PyTorch's wheels include the CUDA libraries, so the base is plain Python 3.11 or later; the host provides the driver.
# The build context holds this file, the locks, torch/ (a custom PyTorch wheel, or nothing), requirements.txt (the
# user's; may be empty), launch_train/ and code/ (may be empty).
ARG BASE=docker.io/library/python:3.12-slim-bookworm
# cu126 supports P4 to H100, cu130 T4 to Blackwell. The plan chooses by the job's machine, never by the build host.
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

# First the lock with PyTorch's pure-Python dependencies, so that the next step finds them installed with their hashes
# checked. Then PyTorch: the custom wheel, else from a lock (PyPI's wheels of this version are the cu130 build), else
# from PyTorch's index, which has no hashes.
#
# The large packages become separate layers, which are compressed, pushed and pulled in parallel while the GPU waits.
# PyTorch for CPUs has neither CUDA nor Triton, so these two layers are empty.
RUN python3 -m venv /opt/venv \
 && /opt/venv/bin/pip install --require-hashes --requirement requirements.lock \
 && set -- torch/*.whl \
 && if [ -e "$1" ]; then \
      /opt/venv/bin/pip install "$1"; \
    elif [ -e "torch-${WHEEL}.lock" ]; then \
      /opt/venv/bin/pip install --require-hashes --requirement "torch-${WHEEL}.lock"; \
    else \
      echo "No lock for ${WHEEL}: installing PyTorch from download.pytorch.org without checking its hash" \
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
# gcc is needed at run time: Triton (torch.compile) compiles its launcher in C when a kernel first runs. (The base has
# Python's headers; a custom base with Debian's Python needs python3-dev.)
ARG WHEEL
RUN if [ "${WHEEL}" != cpu ]; then \
      apt-get update \
      && apt-get install --yes --no-install-recommends gcc libc6-dev \
      && rm -rf /var/cache/apt/* /var/lib/apt/lists/*; \
    fi

# The code does not run as root. The user is set by number, as a custom base may already have a user with this id. The
# group can write to /workspace: a rehearsal runs with the local user's id and joins the group.
RUN getent passwd 1000 || useradd --create-home --uid 1000 --user-group launch \
 && install --directory --owner 1000 --group 1000 --mode 775 /workspace

# The user's files must not shadow launch_train: PYTHONPATH comes first, and PYTHONSAFEPATH adds no script folder. The
# user's code is the working directory; launch_train.node adds it after the standard library, so that it shadows neither.
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

# The constraint prevents a requirement from replacing this build of PyTorch. Packages that link against PyTorch must be
# built for the same variant: PyPI's torchvision is for CUDA 13 and fails to import with a cu126 or cpu build. These
# builds have their variant in the version, and PyTorch's index has the matching packages.
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
