# The image of nodes without a GPU: head, Ray Data, TensorBoard. Build at the root of the repository:
#   docker build -f infra/docker/cpu.Dockerfile -t REGISTRY/moco_ray-cpu:VERSION .
# The same packages as gpu.Dockerfile, but torch's builds for CPUs: 3 GB of CUDA less. Ray demands the same Python and Ray on all nodes,
# so change both files together.

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
# torch first, from its own index and alone; a pin of 2.14.1 is met by its build 2.14.1+cpu.
RUN pip install --no-cache-dir --no-deps -c constraints.txt --index-url https://download.pytorch.org/whl/cpu torch torchvision torchcodec \
    && pip install --no-cache-dir -c constraints.txt '.[jobs,pack]' \
    && chmod 755 /usr/local/bin/drain_on_notice.py

ENV PYTHONUNBUFFERED=1

USER 1000:1000
ENTRYPOINT ["/usr/bin/tini", "--"]
CMD ["moco-ray", "--help"]
