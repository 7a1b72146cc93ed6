# The control plane: CPU only, no torch. Build it from the repository's root:
#   docker build -f deploy/docker/control-plane.Dockerfile -t pagewire-control-plane .
# Only what every Docker engine's classic builder knows is used, and few layers.
ARG BASE_IMAGE=python:3.12-slim

# Without the wheels, which would travel twice.
FROM ${BASE_IMAGE} AS source
COPY . /src/
RUN rm -rf /src/deploy

FROM ${BASE_IMAGE} AS build
COPY deploy/docker/wheelhouse /wheelhouse
COPY pyproject.toml constraints.txt deploy/docker/requirements.py deploy/docker/pip-install.sh /src/
RUN python3 /src/requirements.py /src/pyproject.toml control > /src/requirements.txt \
 && /src/pip-install.sh -c /src/constraints.txt -r /src/requirements.txt
COPY --from=source /src /src
RUN /src/pip-install.sh --no-deps /src

FROM ${BASE_IMAGE}
# /models exists here so that a new volume mounted there belongs to this user.
RUN useradd --create-home --uid 10001 pagewire && install -d -o pagewire -g pagewire /models
COPY --from=build /opt/pagewire /opt/pagewire
ENV PATH=/opt/pagewire/bin:$PATH PYTHONUNBUFFERED=1
USER pagewire
WORKDIR /home/pagewire
# Public, workers, metrics.
EXPOSE 50051 50052 9464
# Of the metrics port, which speaks plain HTTP whatever certificates and tokens the public port wants.
HEALTHCHECK --interval=10s --timeout=10s --start-period=120s --retries=3 CMD ["python", "-c", "\
from urllib.request import ProxyHandler, build_opener; \
build_opener(ProxyHandler({})).open('http://127.0.0.1:9464/healthz', timeout=5)"]
ENTRYPOINT ["python", "-m", "control_plane"]
