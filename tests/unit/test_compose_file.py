"""docker-compose.yml and the images, as far as they can be judged without a Docker engine."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from control_plane.config import parse_args as control_plane_args
from data_plane.config import parse_args as worker_args

ROOT = Path(__file__).resolve().parents[2]
DOCKER_DIR = ROOT / "deploy" / "docker"
DOCKERFILES = sorted(DOCKER_DIR.glob("*.Dockerfile"))
LONG_RUNNING = ["redis", "control-plane", "data-plane", "data-plane-gpu"]
BUILT = ["model", "control-plane", "data-plane", "data-plane-gpu"]

# What docker-compose 1.29 and docker compose v2 both know.
TOP_LEVEL_KEYS = {"services", "networks", "volumes"}
SERVICE_KEYS = {
    "build", "cap_drop", "command", "depends_on", "deploy", "healthcheck", "image", "init",
    "network_mode", "networks", "ports", "profiles", "restart", "security_opt",
    "stop_grace_period", "volumes",
}  # fmt: skip
BUILD_KEYS = {"args", "context", "dockerfile", "network", "target"}


def interpolate(text: str, environment: dict[str, str] | None = None) -> str:
    """Replaces ${NAME:-default} as compose does, with nothing but `environment` set."""
    values = environment or {}
    return re.sub(r"\$\{([A-Z_]+):-([^}]*)\}", lambda match: values.get(match[1]) or match[2], text)


def load_compose(environment: dict[str, str] | None = None) -> dict[str, Any]:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    return yaml.safe_load(interpolate(text, environment))


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return load_compose()


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Any]:
    return compose["services"]


def test_only_keys_of_both_compose_generations_are_used(compose: dict[str, Any]) -> None:
    assert {key for key in compose if not key.startswith("x-")} == TOP_LEVEL_KEYS
    for name, service in compose["services"].items():
        assert set(service) <= SERVICE_KEYS, name
        assert set(service.get("build", {})) <= BUILD_KEYS, name


def test_services_are_the_five_of_the_design(services: dict[str, Any]) -> None:
    assert sorted(services) == sorted([*LONG_RUNNING, "model"])
    assert services["data-plane-gpu"]["profiles"] == ["gpu"]
    assert all("profiles" not in services[name] for name in services if name != "data-plane-gpu")


def test_only_the_public_port_is_published_and_only_on_loopback(services: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {"control-plane": ["127.0.0.1:50051:50051"]}


def test_the_published_address_can_be_chosen() -> None:
    services = load_compose({"PAGEWIRE_BIND": "10.0.0.7", "PAGEWIRE_PORT": "6000"})["services"]
    assert services["control-plane"]["ports"] == ["10.0.0.7:6000:50051"]


@pytest.mark.parametrize("name", ["data-plane", "data-plane-gpu"])
def test_workers_can_be_scaled(services: dict[str, Any], name: str) -> None:
    """A fixed name, host port or worker id would make the second container fail."""
    assert not {"container_name", "hostname", "ports"} & set(services[name])
    assert not any("--worker-id" in argument for argument in services[name]["command"])


def test_workers_and_redis_are_on_the_internal_network_only(compose: dict[str, Any]) -> None:
    assert compose["networks"]["internal"] == {"internal": True}
    for name in ("redis", "data-plane", "data-plane-gpu"):
        assert compose["services"][name]["networks"] == ["internal"], name


def test_planes_start_after_the_model_is_there(services: dict[str, Any]) -> None:
    for name in ("control-plane", "data-plane", "data-plane-gpu"):
        condition = services[name]["depends_on"]["model"]["condition"]
        assert condition == "service_completed_successfully", name
    assert services["control-plane"]["depends_on"]["redis"]["condition"] == "service_healthy"
    assert "restart" not in services["model"]


def test_workers_do_not_depend_on_a_healthy_control_plane(services: dict[str, Any]) -> None:
    assert services["data-plane"]["depends_on"]["control-plane"]["condition"] == "service_started"


def test_planes_run_under_an_init_process(services: dict[str, Any]) -> None:
    """Process 1 of a container does not see a SIGTERM that it has no handler for yet."""
    assert all(services[name]["init"] for name in LONG_RUNNING if name != "redis")


def test_redis_keeps_its_data(services: dict[str, Any]) -> None:
    command = services["redis"]["command"]
    assert command[command.index("--appendonly") + 1] == "yes"
    assert services["redis"]["volumes"] == ["redis:/data"]
    # Options only: the entry point of Redis' and Valkey's images then drops root.
    assert command[0].startswith("--")


def test_both_planes_see_one_model_read_only(services: dict[str, Any]) -> None:
    for name in ("control-plane", "data-plane", "data-plane-gpu"):
        assert services[name]["volumes"] == ["models:/models:ro"], name
        assert "--model=/models/smollm2-135m-instruct" in services[name]["command"], name
    assert services["model"]["volumes"] == ["models:/models"]
    assert services["model"]["command"] == ["smollm2-135m-instruct"]


def test_a_model_of_ones_own_is_mounted_and_named() -> None:
    environment = {"PAGEWIRE_MODELS_DIR": "/data/checkpoints", "PAGEWIRE_MODEL": "mine"}
    services = load_compose(environment)["services"]
    assert services["data-plane"]["volumes"] == ["/data/checkpoints:/models:ro"]
    assert "--model=/models/mine" in services["control-plane"]["command"]
    assert services["model"]["command"] == ["mine"]


@pytest.mark.parametrize("name", ["control-plane", "data-plane", "data-plane-gpu"])
def test_planes_accept_their_commands(services: dict[str, Any], name: str, tmp_path: Path) -> None:
    (tmp_path / "smollm2-135m-instruct").mkdir()
    parse_args = control_plane_args if name == "control-plane" else worker_args
    config = parse_args(
        [arg.replace("/models", str(tmp_path)) for arg in services[name]["command"]]
    )
    # Docker kills what has not ended by then.
    assert config.grace_s < float(services[name]["stop_grace_period"].removesuffix("s"))


@pytest.mark.parametrize("name", BUILT)
def test_build_arguments_and_targets_exist(services: dict[str, Any], name: str) -> None:
    build = services[name]["build"]
    text = (ROOT / build["dockerfile"]).read_text(encoding="utf-8")
    assert set(build["args"]) <= set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
    if "target" in build:
        assert re.search(rf"^FROM \S+ AS {build['target']}$", text, re.MULTILINE)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_images_need_no_buildkit_and_run_as_a_user(dockerfile: Path) -> None:
    text = dockerfile.read_text(encoding="utf-8")
    assert not re.search(r"--mount|<<|^# *syntax|--exclude|--link", text, re.MULTILINE)
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["pagewire"]
    assert re.search(r"^ENTRYPOINT \[", text, re.MULTILINE)
    assert "ARG BASE_IMAGE=python:3.12-slim" in text


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_what_images_copy_is_in_the_build_context(dockerfile: Path) -> None:
    allowed = [
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    ]
    text = dockerfile.read_text(encoding="utf-8")
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists(), source
            assert source == "." or any(f"{source}/".startswith(f"{name}/") for name in allowed)


def test_every_package_is_in_the_build_context() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for package in setuptools["packages"]:
        top = package.split(".")[0]
        path = setuptools["package-dir"].get(top, top)
        assert f"!{path}" in allowed, package


def test_workers_health_check_names_the_worker_port() -> None:
    text = (DOCKER_DIR / "data-plane.Dockerfile").read_text(encoding="utf-8")
    assert f":{50052:04X} 01 " in text
