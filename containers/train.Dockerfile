# The training image: PyTorch for one CUDA variant, our train package, then the user's code.
# Layers go from what changes least to what changes most, so that an edit sends the last one only.
#
# PyTorch's wheels bring CUDA's libraries, so the base is plain Python; the machine brings the driver.
ARG BASE=docker.io/library/python:3.12-slim-bookworm
FROM ${BASE}

# cu126 reaches P4 to H100, cu130 T4 to Blackwell: the plan picks by the machine, never by the host that builds.
ARG WHEEL=cu126
ARG TORCH=2.13.0

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    # A user's train.py must not hide our package: ours comes first, and no script folder goes in front.
    PYTHONSAFEPATH=1 \
    PYTHONPATH=/opt/launch:/workspace

RUN pip install "torch==${TORCH}" --index-url "https://download.pytorch.org/whl/${WHEEL}" \
 && pip install "numpy>=2.1" "tensorboard>=2.20" "google-cloud-storage>=3.4"

COPY train /opt/launch/train
WORKDIR /workspace
ENTRYPOINT ["python", "-m", "train.node"]
