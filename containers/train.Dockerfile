# The training image: PyTorch for one CUDA variant, our train package, then what the user needs and the user's code.
# Layers go from what changes least to what changes most, so that an edit sends the last one only.
# The build context holds train/ (our package), requirements.txt (the user's; may be empty) and code/ (may be empty).
#
# PyTorch's wheels bring CUDA's libraries, so the base is plain Python; the machine brings the driver.
ARG BASE=docker.io/library/python:3.12-slim-bookworm
FROM ${BASE}

# cu126 reaches P4 to H100, cu130 T4 to Blackwell: the plan picks by the machine, never by the host that builds.
ARG WHEEL=cu126
ARG TORCH=2.13.0

# torch.compile builds a small C library for Triton when it first runs.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# The constraint: a requirement of the user's must not put another build of torch in the place of this one unseen.
RUN pip install "torch==${TORCH}" --index-url "https://download.pytorch.org/whl/${WHEEL}" \
 && pip install "numpy>=2.1" "tensorboard>=2.20" "google-cloud-storage>=3.4" \
 && mkdir /opt/launch \
 && pip freeze | grep "^torch==" > /opt/launch/constraints.txt

# No root: the code needs none, and what it writes outside the bucket stays its own.
RUN useradd --create-home --uid 1000 launch \
 && install --directory --owner launch --group launch /workspace

COPY train /opt/launch/train

COPY requirements.txt /opt/launch/requirements.txt
RUN pip install --requirement /opt/launch/requirements.txt --constraint /opt/launch/constraints.txt

# A user's train.py must not hide our package: ours comes first, and no script folder goes in front of it. The user's
# code is the working directory: train.node puts it behind the standard library, which it must not hide either.
ENV PYTHONSAFEPATH=1 \
    PYTHONPATH=/opt/launch

COPY --chown=launch:launch code /workspace
USER launch
WORKDIR /workspace
ENTRYPOINT ["python", "-m", "train.node"]

ARG REVISION=
ARG SOURCE=
ARG VERSION=
LABEL org.opencontainers.image.title="launch train" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.version="${VERSION}"
