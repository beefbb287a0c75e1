# The image of GPU nodes (and of the head, if you want one image only). Build at the root of the repository:
#   docker build -f infra/docker/gpu.Dockerfile -t REGISTRY/moco_ray-gpu:VERSION .
# CUDA's libraries and NCCL come with torch's packages of PyPI, pinned in constraints.txt; the host brings NVIDIA's driver (CUDA 13: 580 or
# newer) and its container toolkit. EFA needs libfabric and aws-ofi-nccl besides: see infra/README.md.

# What to change is here. For a build that cannot change under you, name the base by digest: python:3.11.11-slim-bookworm@sha256:...
ARG PYTHON_IMAGE=python:3.11.11-slim-bookworm
FROM ${PYTHON_IMAGE}

# KubeRay's probes call wget; `ray up` reaches workers with ssh and rsync; tini reaps what dead workers leave behind.
# Debian keeps only the newest version of a package, so pins of them break the build within weeks.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes ca-certificates git openssh-client procps rsync tini wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 --shell /bin/bash moco

WORKDIR /opt/moco_ray
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY moco_ray ./moco_ray
COPY jobs ./jobs
COPY infra/drain_on_notice.py /usr/local/bin/drain_on_notice.py
RUN pip install --no-cache-dir -c constraints.txt '.[jobs,pack]' \
    && chmod 755 /usr/local/bin/drain_on_notice.py

# NCCL: sockets by the pod's or node's own interface; its warnings in the worker's log.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NCCL_DEBUG=WARN \
    PYTHONUNBUFFERED=1

USER 1000:1000
ENTRYPOINT ["/usr/bin/tini", "--"]
CMD ["moco-ray", "--help"]
